import assert from 'node:assert/strict'
import { type DType, partition, resolvePlan } from '@rankwise/core'
import type { Check, CheckGroup } from '../check.ts'
import { expectSame } from '../compare/expect-same.ts'
import { loadTinyGolden, loadTinyWeights, tinyInputsIn } from '../tiny-golden.ts'
import { TINY_PLAN, TinyTransformer } from '../tiny-transformer.ts'
import type { BackendSubject } from './options.ts'
import { runInProcess } from './run-in-process.ts'

/** The tiny transformer and both of its blocks against torch, on 1, 2 and 4 ranks of this process. */
export function modelGroup(subject: BackendSubject): CheckGroup {
  const { dtypes } = subject.supports
  return {
    title: 'blocks and a tiny transformer, against torch',
    checks: dtypes.flatMap((dtype) => [1, 2, 4].map((tpDegree) => modelCheck(subject, dtype, tpDegree))),
  }
}

function modelCheck(subject: BackendSubject, dtype: DType, tpDegree: number): Check {
  return {
    title: `in ${dtype} at degree ${tpDegree}`,
    run: async () => {
      const { inputs, outputs: expected } = await loadTinyGolden()
      const model = new TinyTransformer()
      const cast = tinyInputsIn(inputs, dtype, subject.supports.dtypes)
      const graph = partition(model.trace(cast), resolvePlan(model, TINY_PLAN), tpDegree)
      const ranks = await runInProcess(subject, graph, await loadTinyWeights(), cast)
      for (const outputs of ranks) {
        for (const [name, whole] of Object.entries(expected)) {
          const output = outputs[name]
          assert.ok(output !== undefined, `the output '${name}' is there`)
          expectSame([output], [whole], { row: 'model', dtype })
          assert.deepEqual(output.data, ranks[0]?.[name]?.data, `all ranks hold the same bits of '${name}'`)
        }
      }
    },
  }
}
