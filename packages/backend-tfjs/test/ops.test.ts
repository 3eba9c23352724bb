import { opNames } from '@rankwise/core'
import { beforeAll, describe, expect, it } from 'vitest'
import { OP_CASES } from '../../backend-ort/test/op-cases.ts'
import type { Engine } from '../src/engine.ts'
import { RULES } from '../src/lowering/rules.ts'
import { ENGINES, engineOf } from './engines.ts'
import { checkOp } from './support.ts'

/** Operands that are weights in models, by operation. */
const WEIGHTS: Readonly<Record<string, readonly number[]>> = {
  linear: [1],
  embedding: [1],
  conv2d: [1, 2],
  layer_norm: [1, 2],
  rms_norm: [1],
  group_norm: [1, 2],
  add: [1],
  mul: [0],
}

it('has a rule for every operation that reaches a backend', () => {
  expect(Object.keys(RULES).sort()).toEqual(
    opNames()
      .filter((op) => op !== 'all_reduce')
      .toSorted(),
  )
})

describe.each(ENGINES)('on %s, every operation computes what float64 does', (name) => {
  let engine: Engine
  beforeAll(async () => {
    engine = await engineOf(name)
  })

  it.each(OP_CASES)('$title', (opCase) => checkOp(engine, opCase))

  const withWeights = OP_CASES.filter(({ op }) => Object.hasOwn(WEIGHTS, op))
  it.each(withWeights)('$title with stored weights', (opCase) => {
    const weights = (WEIGHTS[opCase.op] ?? []).filter((index) => index < opCase.inputs.length)
    return checkOp(engine, opCase, { weights })
  })
})
