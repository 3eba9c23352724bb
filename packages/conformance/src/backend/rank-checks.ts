import assert from 'node:assert/strict'
import type { DType, MemoryReport, Tensor } from '@rankwise/core'
import type { Check } from '../check.ts'
import { expectSame } from '../compare/expect-same.ts'
import { onRanks } from '../ranks/rank-processes.ts'
import { loadTinyGolden } from '../tiny-golden.ts'
import { counted } from './bench.ts'

/** What `runBackendRank` gets. */
export interface BackendRankTask {
  readonly dtype: DType
}

/** What one rank did: structured-cloneable. */
export interface BackendRankResult {
  readonly outputs: Readonly<Record<string, Pick<Tensor, 'dtype' | 'shape' | 'data'>>>
  /** After the model was disposed. */
  readonly memory: MemoryReport
  /** Code of the error that a run ends with which rank 0 aborts. */
  readonly aborted: string
}

/** The tiny transformer in one process per rank, loaded from its folder by `fromPretrained`. */
export function rankChecks(worker: URL, dtype: DType): readonly Check[] {
  return [2, 4].map((worldSize) => ({
    title: `on ${worldSize} processes: loads its shards, agrees with torch, stops together, frees all`,
    timeoutMs: 120_000,
    run: async () => {
      const { outputs: expected } = await loadTinyGolden()
      const task: BackendRankTask = { dtype }
      const ranks = await onRanks<BackendRankResult>(worldSize, worker, task)
      for (const [rank, { outputs, memory, aborted }] of ranks.entries()) {
        for (const [name, whole] of Object.entries(expected)) {
          expectSame([outputs[name] as Tensor], [whole], { row: 'model', dtype })
          assert.deepEqual(
            outputs[name]?.data,
            ranks[0]?.outputs[name]?.data,
            `all ranks hold the same bits of ${name}`,
          )
        }
        assert.deepEqual(counted(memory), { weightBytes: 0, mappedBytes: 0, executables: 0 })
        assert.equal(aborted, 'ABORTED', `rank ${rank} when rank 0 aborts`)
      }
    },
  }))
}
