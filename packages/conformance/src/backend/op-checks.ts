import { type DType, isFloatingPoint, opNames, type Tensor } from '@rankwise/core'
import { referenceOp } from '@rankwise/core/reference'
import type { Check, CheckGroup } from '../check.ts'
import { expectSame } from '../compare/expect-same.ts'
import { toleranceRow } from '../compare/tolerance-table.ts'
import type { OpCase } from '../ops/op-case.ts'
import { OP_CASES } from '../ops/op-cases.ts'
import { opGraph, segmentOf } from '../ops/op-graph.ts'
import { onBackend } from './bench.ts'
import type { BackendSubject } from './options.ts'

/** Runs the only operation of a graph on operands. */
export type OpRunner = (opCase: OpCase) => Promise<readonly Tensor[]>

/** Every operation against float64, in every dtype that the backend declares. */
export function opGroups(subject: BackendSubject): readonly CheckGroup[] {
  return subject.supports.dtypes.map((dtype) => ({
    title: `operations in ${dtype}`,
    checks: opNames()
      .filter((op) => OP_CASES.some((opCase) => opCase.op === op))
      .map((op) => opCheck(subject, op, dtype)),
  }))
}

function opCheck(subject: BackendSubject, op: string, dtype: DType): Check {
  const cases = OP_CASES.filter((opCase) => opCase.op === op)
  return {
    title: op,
    run: () =>
      onBackend(subject, async (bench) => {
        const runOne: OpRunner = ({ inputs, attributes }) =>
          bench.run(segmentOf(opGraph(op, inputs, attributes)), inputs)
        const failures: string[] = []
        for (const opCase of cases) {
          await checkOpCase(inDType(opCase, dtype), runOne, dtype).catch((error: unknown) => {
            failures.push(`${opCase.title}: ${error instanceof Error ? error.message : error}`)
          })
        }
        if (failures.length > 0) {
          throw new Error(`${failures.length} of ${cases.length} cases of ${op}\n${failures.join('\n')}`)
        }
      }),
  }
}

/** The case with floating-point operands of another dtype; what they are rounded to is what is computed with. */
function inDType(opCase: OpCase, dtype: DType): OpCase {
  return { ...opCase, inputs: opCase.inputs.map((x) => (isFloatingPoint(x.dtype) ? x.cast(dtype) : x)) }
}

/**
 * Compares what `run` computes with float64.
 *
 * @param dtype - whose tolerance applies to results that are not integers. @default 'float32'
 * @throws Error naming the worst index
 */
export async function checkOpCase(opCase: OpCase, run: OpRunner, dtype: DType = 'float32'): Promise<void> {
  const { op, inputs, attributes } = opCase
  const expected = referenceOp(op, inputs, attributes)
  const [first] = inputs
  const computed = op === 'embedding' || first === undefined || isFloatingPoint(first.dtype) ? dtype : first.dtype
  expectSame(await run(opCase), expected, { row: toleranceRow(op), dtype: computed })
}
