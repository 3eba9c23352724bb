import { checkOpCase, OP_CASES, type OpCase, opGraph, segmentOf } from '@rankwise/conformance'
import type { Segment, Tensor } from '@rankwise/core'
import { expect } from 'vitest'
import { TfjsTensor } from '../src/device-tensor.ts'
import type { Engine } from '../src/engine.ts'
import { TfjsExecutable } from '../src/executable.ts'
import type { Rules } from '../src/lowering/rule.ts'
import { WeightStore } from '../src/weight-store.ts'

/** The cases of operations in dtypes that the engine computes in. */
export function casesFor({ dtypes }: Pick<Engine, 'dtypes'>): readonly OpCase[] {
  return OP_CASES.filter(({ op, attributes }) => op !== 'cast' || dtypes.some((dtype) => dtype === attributes.dtype))
}

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
    const type = dtype as 'float32' | 'int32'
    return new TfjsTensor({ engine, dtype: type, shape, ref: engine.write(type, shape, data) })
  })
  try {
    const results = await executable.run(
      given,
      weights.map((weight) => store.add(weight, 'float32')),
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
export function checkOp(
  engine: Engine,
  opCase: OpCase,
  { weights = [], rules }: { readonly weights?: readonly number[]; readonly rules?: Rules } = {},
): Promise<void> {
  return checkOpCase(opCase, ({ op, inputs, attributes }) => {
    const segment = segmentOf(opGraph(op, inputs, attributes, weights))
    const values = inputs.filter((_, i) => !weights.includes(i))
    const stored = inputs.filter((_, i) => weights.includes(i))
    return runSegment(engine, segment, values, { weights: stored, rules })
  })
}
