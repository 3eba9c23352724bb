import assert from 'node:assert/strict'
import { type DType, type MemoryReport, Tensor } from '@rankwise/core'
import type { Check } from '../check.ts'
import { expectSame } from '../compare/expect-same.ts'
import { onRanks } from '../ranks/rank-processes.ts'
import { loadTinyGolden } from '../tiny-golden.ts'
import { counted } from './bench.ts'

/** What `runBackendRank` gets. */
export interface BackendRankTask {
  /** What to compute in, one after the other; the rotary tables of 16-bit dtypes are float32 where it is among them. */
  readonly dtypes: readonly DType[]
}

/** Outputs of the model by name. */
export type BackendRankOutputs = Readonly<Record<string, Pick<Tensor, 'dtype' | 'shape' | 'data'>>>

/** What one rank did: structured-cloneable. */
export interface BackendRankResult {
  /** By dtype. */
  readonly outputs: Readonly<Record<string, BackendRankOutputs>>
  /** After the models were disposed. */
  readonly memory: MemoryReport
  /** Code of the error that a run ends with which rank 0 aborts. */
  readonly aborted: string
}

/** The tiny transformer in every dtype, in one process per rank, loaded from its folder by `fromPretrained`. */
export function rankChecks(worker: URL, dtypes: readonly DType[]): readonly Check[] {
  return [2, 4].map((worldSize) => ({
    title: `on ${worldSize} processes, in ${dtypes.join(', ')}: loads its shards, agrees with torch, stops together, frees all`,
    timeoutMs: 120_000,
    run: async () => {
      const { outputs: expected } = await loadTinyGolden()
      const task: BackendRankTask = { dtypes }
      const ranks = await onRanks<BackendRankResult>(worldSize, worker, task)
      for (const [rank, { outputs, memory, aborted }] of ranks.entries()) {
        for (const dtype of dtypes) {
          for (const [name, whole] of Object.entries(expected)) {
            const output = outputs[dtype]?.[name]
            assert.ok(output !== undefined, `the output '${name}' is there`)
            // Methods of a tensor do not survive the way from another process.
            const tensor = new Tensor(output.dtype, output.shape, output.data as never)
            expectSame([tensor], [whole], { row: 'model', dtype })
            const first = ranks[0]?.outputs[dtype]?.[name]?.data
            assert.deepEqual(output.data, first, `all ranks hold the same bits of ${name} in ${dtype}`)
          }
        }
        assert.deepEqual(counted(memory), { weightBytes: 0, mappedBytes: 0, executables: 0 })
        assert.equal(aborted, 'ABORTED', `rank ${rank} when rank 0 aborts`)
      }
    },
  }))
}
