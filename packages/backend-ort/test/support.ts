import {
  type Attributes,
  type Graph,
  opDefinition,
  partition,
  type Segment,
  type Shape,
  sizeOf,
  stepsOf,
  Tensor,
  type TensorType,
  type Value,
} from '@rankwise/core'
import { referenceOp } from '@rankwise/core/reference'
import { expectClose } from '@rankwise/fixtures'
import { expect } from 'vitest'
import { LOWERING_RULES, lowerSegment } from '../src/lowering/lower-segment.ts'
import type { LoweringRules } from '../src/lowering/rule.ts'
import { OrtSession } from '../src/session.ts'
import { rowsShape, type WeightDType } from '../src/weight-storage.ts'
import { WeightTensor } from '../src/weight-tensor.ts'

/** Relative RMS against float64 that every operation keeps. */
export const TOLERANCE = 1e-6

/** Uniform numbers in (0, 1] from a seed (a linear congruential generator modulo 2^32), so that failures repeat. */
function uniform(seed: number): () => number {
  let state = (seed * 2654435761) >>> 0
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0
    return (state + 1) / 2 ** 32
  }
}

/** Normally distributed numbers. @param spread - @default { mean: 0, deviation: 1 } */
export function normal(
  shape: Shape,
  seed: number,
  { mean = 0, deviation = 1 }: { readonly mean?: number; readonly deviation?: number } = {},
): Tensor<'float32'> {
  const next = uniform(seed)
  const sample = () => mean + deviation * Math.sqrt(-2 * Math.log(next())) * Math.cos(2 * Math.PI * next())
  return Tensor.float32(shape, Float32Array.from({ length: sizeOf(shape) }, sample))
}

/** Uniform numbers between two bounds. */
export function between(low: number, high: number, shape: Shape, seed: number): Tensor<'float32'> {
  const next = uniform(seed)
  return Tensor.float32(
    shape,
    Float32Array.from({ length: sizeOf(shape) }, () => low + (high - low) * next()),
  )
}

/** Rows 0, 1, … of cosines and sines as a rotary embedding takes them, `[tokens, width]`. */
export function rotation(tokens: number, width: number): { readonly cos: Tensor; readonly sin: Tensor } {
  const angles = Float64Array.from({ length: tokens * width }, (_, i) => {
    return Math.floor(i / width) / 2000 ** ((i % width) / width)
  })
  const table = (f: (angle: number) => number) => Tensor.float32([tokens, width], Float32Array.from(angles, f))
  return { cos: table(Math.cos), sin: table(Math.sin) }
}

/**
 * A graph of one operation.
 *
 * @param weights - indices of the operands that are parameters; the others are inputs. @default none
 */
export function graphOf(
  op: string,
  operands: readonly TensorType[],
  attributes: Attributes,
  weights: readonly number[] = [],
): Graph {
  const values = operands.map(({ dtype, shape }, id): Value => {
    return { id, kind: weights.includes(id) ? 'parameter' : 'input', dtype, shape, name: String(id) }
  })
  const outputs = opDefinition(op)
    .infer(values, attributes)
    .map(({ dtype, shape }, i): Value => ({ id: values.length + i, kind: 'result', dtype, shape }))
  return {
    name: op,
    inputs: values.filter(({ kind }) => kind === 'input'),
    parameters: values.filter(({ kind }) => kind === 'parameter'),
    constants: [],
    nodes: [{ op, inputs: values, attributes, outputs, path: 'module' }],
    outputs: Object.fromEntries(outputs.map((value, i) => [String(i), value])),
  }
}

/** The only segment of a graph on one rank. */
export function segmentOf(graph: Graph): Segment {
  const [step, ...others] = stepsOf(partition(graph, new Map(), 1), 0)
  if (step?.kind !== 'segment' || others.length > 0) throw new Error('the graph is not one segment')
  return step.segment
}

/** How `runSegment` runs. */
export interface RunOptions {
  /** @default those of the backend */
  readonly rules?: LoweringRules | undefined
  /** @default 1 */
  readonly threads?: number
}

/** What a segment computes from its inputs and weights, in their order. */
export async function runSegment(
  segment: Segment,
  inputs: readonly Tensor[],
  weights: readonly WeightTensor[] = [],
  { rules = LOWERING_RULES, threads = 1 }: RunOptions = {},
): Promise<readonly Tensor[]> {
  const storages = weights.map(({ layout }) => layout)
  const { model, weightInputs } = lowerSegment(segment, storages, rules)
  const session = await OrtSession.create(model, { threads })
  try {
    const rows = weightInputs.map(({ parameter, start, end }) => (weights[parameter] as WeightTensor).rows(start, end))
    return await session.run([...inputs, ...rows])
  } finally {
    await session.release()
  }
}

/** A weight in memory, of consecutive pieces. @param pieces - rows of each. @default all */
export function weightOf(tensor: Tensor, pieces: readonly number[] = [tensor.shape[0] ?? 1]): WeightTensor {
  const { shape, data } = tensor
  const dtype = tensor.dtype as WeightDType
  const width = sizeOf(shape.slice(1))
  let end = 0
  const parts = pieces.map((rows) => {
    const start = end
    end += rows
    const part = (data as Float32Array | Uint16Array).slice(start * width, end * width)
    return new Tensor(dtype, rowsShape(shape, rows), part)
  })
  return new WeightTensor({ pieces: parts, shape })
}

/** One operation on concrete operands. */
export interface OpCase {
  readonly op: string
  readonly title: string
  readonly inputs: readonly Tensor[]
  readonly attributes: Attributes
  /** Whether the results are copies of operands, so that they must be equal bit by bit. */
  readonly isExact: boolean
}

/** Fails unless the rules compute a case as float64 does. */
export async function checkOp({ op, inputs, attributes, isExact }: OpCase, rules?: LoweringRules): Promise<void> {
  const results = await runSegment(segmentOf(graphOf(op, inputs, attributes)), inputs, [], { rules })
  const expected = referenceOp(op, inputs, attributes)
  expect(results.length).toBe(expected.length)
  for (const [i, result] of results.entries()) requireClose(result, expected[i] as Tensor, isExact ? 0 : TOLERANCE)
}

export function requireClose(actual: Tensor, expected: Tensor, relativeRms: number): void {
  expect(actual.shape).toEqual(expected.shape)
  if (sizeOf(expected.shape) > 0) expectClose(actual, expected, { relativeRms })
}
