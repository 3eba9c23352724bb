import { checkOpCase, type OpCase, opGraph, segmentOf } from '@rankwise/conformance'
import { type Segment, sizeOf, Tensor } from '@rankwise/core'
import { expectClose } from '@rankwise/fixtures'
import { expect } from 'vitest'
import { ENGINE_VARIABLE, selectEngine } from '../src/engine/engine-selection.ts'
import { lowerSegment } from '../src/lowering/lower-segment.ts'
import type { LoweringRules } from '../src/lowering/rule.ts'
import { rowsShape, type WeightDType } from '../src/weight-storage.ts'
import { WeightTensor } from '../src/weight-tensor.ts'

/** Relative RMS against float64 that every operation keeps. */
export const TOLERANCE = 1e-6

/** How `runSegment` runs. */
export interface RunOptions {
  /** @default those of the backend */
  readonly rules?: LoweringRules | undefined
  /** @default 1 */
  readonly threads?: number
}

/** What a segment computes from its inputs and weights, in their order, on the engine that the environment names. */
export async function runSegment(
  segment: Segment,
  inputs: readonly Tensor[],
  weights: readonly WeightTensor[] = [],
  { rules, threads = 1 }: RunOptions = {},
): Promise<readonly Tensor[]> {
  const storages = weights.map(({ layout }) => layout)
  const { engine } = await selectEngine(process.env[ENGINE_VARIABLE] ?? 'auto', { threads, pinThreads: false })
  const { model, weightInputs } = lowerSegment(segment, storages, { rules, target: engine.target })
  try {
    const session = await engine.createSession(model)
    const rows = weightInputs.map(({ parameter, start, end }) => (weights[parameter] as WeightTensor).rows(start, end))
    const results = await session.run([...inputs, ...rows])
    await session.release()
    return results
  } finally {
    await engine.dispose()
  }
}

/** Whether the engine that the environment names multiplies by weights in bfloat16 with a kernel of its own. */
export const HAS_LINEAR: boolean = await hasLinear()

async function hasLinear(): Promise<boolean> {
  const { engine } = await selectEngine(process.env[ENGINE_VARIABLE] ?? 'auto', { threads: 1, pinThreads: false })
  await engine.dispose()
  return engine.target.hasLinear
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

/** Fails unless the rules compute a case as float64 does. */
export function checkOp(opCase: OpCase, rules?: LoweringRules): Promise<void> {
  const run = ({ op, inputs, attributes }: OpCase) =>
    runSegment(segmentOf(opGraph(op, inputs, attributes)), inputs, [], { rules })
  return checkOpCase(opCase, run)
}

export function requireClose(actual: Tensor, expected: Tensor, relativeRms: number): void {
  expect(actual.shape).toEqual(expected.shape)
  if (sizeOf(expected.shape) > 0) expectClose(actual, expected, { relativeRms })
}
