import { opNames } from '@rankwise/core'
import { describe, expect, it } from 'vitest'
import { OP_CASES } from './op-cases.ts'
import { checkOp } from './support.ts'

describe('every operation computes what float64 does', () => {
  it('has several cases of every operation', () => {
    const counts = new Map(opNames().map((op) => [op, OP_CASES.filter((known) => known.op === op).length]))
    const few = [...counts].filter(([, count]) => count < 3).map(([op]) => op)
    // shard has a test of its own; all_reduce never reaches a backend.
    expect(few).toEqual(['shard', 'all_reduce'])
  })

  it.each(OP_CASES)('$title', async (opCase) => checkOp(opCase))
})
