import { type Segment, sizeOf, type Tensor } from '@rankwise/core'
import { referenceOp } from '@rankwise/core/reference'
import { expectClose } from '@rankwise/fixtures'
import { expect } from 'vitest'
import { graphOf, type OpCase, segmentOf } from '../../backend-ort/test/support.ts'
import { TfjsTensor } from '../src/device-tensor.ts'
import type { Engine } from '../src/engine.ts'
import { TfjsExecutable } from '../src/executable.ts'
import type { Rules } from '../src/lowering/rule.ts'
import { WeightStore } from '../src/weight-store.ts'

/** Relative RMS against float64 that every operation keeps. tfjs's kernels for WebAssembly add up one after the other. */
const TOLERANCES = { wasm: 2e-6, native: 1e-6, 'native-gpu': 1e-6 } as const

/** What a segment computes from its inputs and weights, in their order; fails where tensors are left in the engine. */
async function runSegment(
  engine: Engine,
  segment: Segment,
  inputs: readonly Tensor[],
  { weights = [], rules }: { readonly weights?: readonly Tensor[]; readonly rules?: Rules | undefined } = {},
): Promise<readonly Tensor[]> {
  const before = engine.liveTensors
  const executable = new TfjsExecutable(segment, { engine, rules })
  const store = new WeightStore(engine)
  const given = inputs.map(({ dtype, shape, data }) => {
    return new TfjsTensor({ engine, shape, ref: engine.write(dtype as 'float32', shape, data) })
  })
  try {
    const results = await executable.run(
      given,
      weights.map((weight) => store.add(weight)),
    )
    const tensors = results.map((result) => (result as TfjsTensor).download())
    for (const result of results) result.dispose()
    return tensors
  } finally {
    for (const tensor of given) tensor.dispose()
    store.dispose()
    await executable.dispose()
    expect(engine.liveTensors).toBe(before)
  }
}

/** Fails unless the rules compute a case as float64 does, with all operands as values or with some as stored weights. */
export async function checkOp(
  engine: Engine,
  { op, inputs, attributes, isExact }: OpCase,
  { weights = [], rules }: { readonly weights?: readonly number[]; readonly rules?: Rules } = {},
): Promise<void> {
  const segment = segmentOf(graphOf(op, inputs, attributes, weights))
  const values = inputs.filter((_, i) => !weights.includes(i))
  const stored = inputs.filter((_, i) => weights.includes(i))
  const results = await runSegment(engine, segment, values, { weights: stored, rules })
  const expected = referenceOp(op, inputs, attributes)
  expect(results.length).toBe(expected.length)
  for (const [i, result] of results.entries())
    requireClose(result, expected[i] as Tensor, isExact ? 0 : TOLERANCES[engine.name])
}

export function requireClose(actual: Tensor, expected: Tensor, relativeRms: number): void {
  expect(actual.shape).toEqual(expected.shape)
  if (sizeOf(expected.shape) > 0) expectClose(actual, expected, { relativeRms })
}
