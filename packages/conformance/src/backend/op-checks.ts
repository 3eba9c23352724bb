import {
  type DType,
  isFloatingPoint,
  itemSize,
  opDefinition,
  opNames,
  type Tensor,
  type TensorType,
} from '@rankwise/core'
import { referenceOp } from '@rankwise/core/reference'
import type { Check, CheckGroup } from '../check.ts'
import { expectClose } from '../compare/expect-close.ts'
import { expectSame } from '../compare/expect-same.ts'
import { toleranceRow } from '../compare/tolerance-table.ts'
import type { OpCase } from '../ops/op-case.ts'
import { OP_CASES } from '../ops/op-cases.ts'
import { castResults, opGraph, segmentOf } from '../ops/op-graph.ts'
import { type Bench, onBackend } from './bench.ts'
import type { BackendSubject } from './options.ts'

/** Runs the only operation of a graph on operands. */
export type OpRunner = (opCase: OpCase) => Promise<readonly Tensor[]>

/** Every operation against float64, in every dtype that the backend declares. */
export function opGroups(subject: BackendSubject): readonly CheckGroup[] {
  return subject.supports.dtypes.map((dtype) => {
    const cases = casesIn(dtype, subject.supports.dtypes)
    const ops = opNames().filter((op) => cases.some((opCase) => opCase.op === op))
    return {
      title: `operations in ${dtype}`,
      checks: ops.map((op) => {
        return opCheck(
          subject,
          dtype,
          cases.filter((opCase) => opCase.op === op),
        )
      }),
    }
  })
}

/** The cases whose dtypes a backend declares, with floating-point operands in `dtype`. */
function casesIn(dtype: DType, declared: readonly DType[]): readonly OpCase[] {
  const isDeclared = ({ op, attributes, float32Operands }: OpCase) => {
    // No graph in one dtype has a cast.
    if (op === 'cast') return declared.length > 1 && declared.includes(attributes.dtype as DType)
    return float32Operands === undefined || (itemSize(dtype) === 2 && declared.includes('float32'))
  }
  return OP_CASES.filter(isDeclared).map((opCase) => inDType(opCase, dtype))
}

/** The case with floating-point operands of another dtype; what they are rounded to is what is computed with. */
function inDType(opCase: OpCase, dtype: DType): OpCase {
  const { inputs, float32Operands = [] } = opCase
  return {
    ...opCase,
    inputs: inputs.map((x, i) => (isFloatingPoint(x.dtype) && !float32Operands.includes(i) ? x.cast(dtype) : x)),
  }
}

function opCheck(subject: BackendSubject, dtype: DType, cases: readonly OpCase[]): Check {
  const [{ op } = { op: '' }] = cases
  const looksInside = itemSize(dtype) === 2 && subject.supports.dtypes.includes('float32')
  return {
    title: op,
    run: () =>
      onBackend(subject, async (bench) => {
        const failures: string[] = []
        for (const opCase of cases) {
          await checkOn(bench, opCase, looksInside).catch((error: unknown) => {
            failures.push(`${opCase.title}: ${error instanceof Error ? error.message : error}`)
          })
        }
        if (failures.length > 0) {
          throw new Error(`${failures.length} of ${cases.length} cases of ${op}\n${failures.join('\n')}`)
        }
      }),
  }
}

async function checkOn(bench: Bench, opCase: OpCase, looksInside: boolean): Promise<void> {
  const runOne: OpRunner = ({ op, inputs, attributes }) => bench.run(segmentOf(opGraph(op, inputs, attributes)), inputs)
  await checkOpCase(opCase, runOne)
  if (looksInside) await checkRounded(bench, opCase)
}

/**
 * Operations of which 16-bit operands have one right result, also where exact values lie between two numbers: float32 has
 * more than twice the bits, so that rounding to it first changes nothing (Figueroa 1995, "When is double rounding innocuous?").
 */
const ROUNDED_ONCE: readonly string[] = ['add', 'sub', 'mul', 'div']

/**
 * Compares what `run` computes with float64: sums, products and quotients in 16 bits bit by bit.
 *
 * @throws Error naming the worst index, or the dtype where it is not what the operation has by its `infer` rule
 */
export async function checkOpCase(opCase: OpCase, run: OpRunner): Promise<void> {
  const { op, inputs, attributes } = opCase
  const { dtype } = resultType(opCase)
  const isRoundedOnce = isFloatingPoint(dtype) && itemSize(dtype) === 2 && ROUNDED_ONCE.includes(op)
  const expected = referenceOp(op, inputs, attributes).map((result) => (isRoundedOnce ? result.cast(dtype) : result))
  expectSame(await run(opCase), expected, { row: isRoundedOnce ? 'movement' : toleranceRow(op), dtype })
}

/** Of the first result; all results of an operation have one dtype. */
function resultType({ op, inputs, attributes }: OpCase): TensorType {
  return opDefinition(op).infer(inputs, attributes)[0] as TensorType
}

/** Within a segment as well, the next operation gets numbers that the 16-bit dtype of a result has. */
async function checkRounded(bench: Bench, opCase: OpCase): Promise<void> {
  const { op, inputs, attributes } = opCase
  const { dtype } = resultType(opCase)
  if (!isFloatingPoint(dtype)) return
  const results = await bench.run(segmentOf(castResults(opGraph(op, inputs, attributes), 'float32')), inputs)
  for (const result of results.filter(({ data }) => data.length > 0)) {
    try {
      expectClose(result, result.cast(dtype), { absolute: 0 })
    } catch (error) {
      const message = (error as Error).message
      throw new Error(`the next operation gets what is not rounded to ${dtype}: ${message}`, { cause: error })
    }
  }
}
