import { OP_CASES, WEIGHT_OPERANDS } from '@rankwise/conformance'
import { opNames } from '@rankwise/core'
import { beforeAll, describe, expect, it } from 'vitest'
import type { Engine } from '../src/engine.ts'
import { RULES } from '../src/lowering/rules.ts'
import { ENGINES, engineOf } from './engines.ts'
import { casesFor, checkOp } from './support.ts'

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

  it.each(casesFor({ dtypes: ['float32', 'bfloat16'] }))('$title', (opCase) => checkOp(engine, opCase))

  const withWeights = OP_CASES.filter(({ op }) => Object.hasOwn(WEIGHT_OPERANDS, op))
  it.each(withWeights)('$title with stored weights', (opCase) => {
    const weights = (WEIGHT_OPERANDS[opCase.op] ?? []).filter((index) => index < opCase.inputs.length)
    return checkOp(engine, opCase, { weights })
  })
})
