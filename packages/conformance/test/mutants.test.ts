import { partition } from '@rankwise/core'
import { describe, expect, it } from 'vitest'
import type { CheckGroup } from '../src/check.ts'
import { failureGroup, operationGroups } from '../src/collectives/checks.ts'
import { expectCaught } from '../src/expect-caught.ts'
import { firstFailure } from '../src/first-failure.ts'
import { backendChecks } from '../src/index.ts'
import { type PlanSubject, planChecks } from '../src/model/plan-checks.ts'
import { launchInProcess } from '../src/ranks/launch-in-process.ts'
import { TINY_DIRECTORY } from '../src/tiny-golden.ts'
import { TinyTransformer } from '../src/tiny-transformer.ts'
import { BROKEN_BACKENDS, NARROW, UNBROKEN_BACKENDS } from './broken-backends.ts'
import { BROKEN_BFLOAT16, UNBROKEN_ROUNDING } from './broken-bfloat16.ts'
import { BROKEN_COLLECTIVES, UNBROKEN_COLLECTIVES } from './broken-collectives.ts'
import { BROKEN_PARTITIONS, BROKEN_PLANS, UNBROKEN_PARTITION } from './broken-plans.ts'

// Each is given to the group of checks that has to notice it; `pnpm test:mutants` lists them with the check that did.

function collectivesGroups(wrap: (typeof BROKEN_COLLECTIVES)[number]['wrap']): readonly CheckGroup[] {
  const subject = { launch: launchInProcess(wrap), sums: 'rank-order', worldSizes: [2] } as const
  return [...operationGroups(subject), failureGroup(subject, { processes: false })]
}

function planGroups(changes: Partial<PlanSubject>): readonly CheckGroup[] {
  const right = {
    model: TinyTransformer,
    directory: TINY_DIRECTORY,
    degrees: [1, 2, 4],
    exchanges: undefined,
    partition,
  }
  return [{ title: 'the plan', checks: planChecks({ ...right, ...changes }) }]
}

describe('nothing is found in what only could be broken', () => {
  // Operations are checked elsewhere on what is not broken, and take the longest.
  const isQuick = ({ title }: CheckGroup) => !title.startsWith('operations')

  it.each([...UNBROKEN_BACKENDS, UNBROKEN_ROUNDING])('a backend: $what', async ({ create, supports = NARROW }) => {
    expect(await firstFailure(backendChecks({ create, supports }).filter(isQuick))).toBeUndefined()
  })

  it('the rounding of a backend, where operations round', async () => {
    const groups = backendChecks(UNBROKEN_ROUNDING).filter((group) => !isQuick(group))
    const rounds = groups.map(({ title, checks }) => {
      return { title, checks: checks.filter((check) => ['cast', 'div', 'linear'].includes(check.title)) }
    })
    expect(rounds.map(({ checks }) => checks.length)).toEqual([3, 3])
    expect(await firstFailure(rounds)).toBeUndefined()
  })

  it('collectives', async () => {
    expect(await firstFailure(collectivesGroups(UNBROKEN_COLLECTIVES))).toBeUndefined()
  })

  it('a plan and a partition', async () => {
    expect(await firstFailure(planGroups({ exchanges: 4 }))).toBeUndefined()
    expect(await firstFailure(planGroups(UNBROKEN_PARTITION))).toBeUndefined()
  })
})

describe('mutants of backends', () => {
  for (const { what, group, create, supports = NARROW } of [...BROKEN_BACKENDS, ...BROKEN_BFLOAT16]) {
    const groups = backendChecks({ create, supports }).filter(({ title }) => title === group)
    it(what, (context) => expectCaught(groups, context))
  }
})

describe('mutants of collectives', () => {
  for (const { what, group, wrap } of BROKEN_COLLECTIVES) {
    const groups = collectivesGroups(wrap).filter(({ title }) => title === group)
    it(what, (context) => expectCaught(groups, context))
  }
})

describe('mutants of plans', () => {
  for (const { what, ...change } of [...BROKEN_PLANS, ...BROKEN_PARTITIONS]) {
    it(what, (context) => expectCaught(planGroups(change), context))
  }
})
