import assert from 'node:assert/strict'
import type { Check, CheckGroup } from '../check.ts'
import type { RankOutcome } from '../ranks/run-rank.ts'
import type { CollectivesReport, CollectivesTask, Scenario } from './scenario.ts'

/** What one rank did, or why it did nothing. */
export type CollectivesOutcome = RankOutcome<CollectivesReport>

/** Runs a task on a new group. */
export type LaunchCollectives = (worldSize: number, task: CollectivesTask) => Promise<readonly CollectivesOutcome[]>

/** What collectives are checked by. */
export interface CollectivesSubject {
  readonly launch: LaunchCollectives
  readonly sums: CollectivesTask['sums']
  readonly worldSizes: readonly number[]
}

const TIMEOUT_MS = 120_000

/** Operations of a group that is well. */
export function operationGroups({ launch, sums, worldSizes }: CollectivesSubject): readonly CheckGroup[] {
  return worldSizes.map((worldSize) => {
    let launched: ReturnType<LaunchCollectives> | undefined
    const reports = async () => {
      launched ??= launch(worldSize, { scenario: 'operations', sums })
      return (await launched).map(reportOf)
    }
    const check = (title: string, run: (all: readonly CollectivesReport[]) => void): Check => ({
      title,
      timeoutMs: TIMEOUT_MS,
      run: async () => run(await reports()),
    })
    const nothingWrong = (all: readonly CollectivesReport[], subject: string) =>
      assert.deepEqual(
        all.map(({ wrong }) => wrong[subject]),
        all.map(() => []),
      )
    return {
      title: `${worldSize} ranks`,
      checks: [
        check('every operation in every dtype, from 0 elements to 300,000', (all) => nothingWrong(all, 'results')),
        check('hold the same bits', (all) => assert.equal(new Set(all.map(({ hash }) => hash)).size, 1)),
        check('run calls that are not waited for in order', (all) => nothingWrong(all, 'order')),
        check('give every call a result of its own', (all) => nothingWrong(all, 'kept')),
        check('leave a barrier when the last has come', (all) => nothingWrong(all, 'barrier')),
        check('refuse bad arguments with their codes, and go on', (all) => {
          nothingWrong(all, 'refusals')
          nothingWrong(all, 'after')
        }),
        check('say so when they are used after destroy', (all) =>
          assert.deepEqual(
            all.map(({ later }) => later),
            all.map(() => 'COLLECTIVES_DESTROYED'),
          ),
        ),
        {
          title: 'end by themselves',
          timeoutMs: TIMEOUT_MS,
          run: async () => {
            await reports()
            for (const { exit } of (await launched) ?? []) assert.deepEqual(exit, { code: 0, signal: null })
          },
        },
      ],
    }
  })
}

interface Failure {
  readonly scenario: Scenario
  readonly title: string
  /** Codes that the waiting ranks end with. */
  readonly others: string
  /** Code that the last rank ends with; undefined where it does not live to tell. */
  readonly own?: string | undefined
  /** Whether the error of the others names the last rank. */
  readonly named: boolean
  readonly message?: RegExp
}

const FAILURES: readonly Failure[] = [
  {
    scenario: 'mismatch',
    title: 'another shape on one rank fails on every rank',
    others: 'COLLECTIVE_MISMATCH',
    own: 'COLLECTIVE_MISMATCH',
    named: false,
  },
  { scenario: 'left', title: 'a rank that leaves is named', others: 'RANK_LOST', own: 'none', named: true },
  {
    scenario: 'abort-signal',
    title: 'an aborted signal is ABORTED here and RANK_LOST elsewhere',
    others: 'RANK_LOST',
    own: 'ABORTED',
    named: true,
  },
  {
    scenario: 'abort',
    title: 'abort reaches every rank with its reason',
    others: 'ABORTED',
    own: 'none',
    named: false,
    message: /out of paper/,
  },
]

/** These need processes that can be killed or stand still. */
const PROCESS_FAILURES: readonly Failure[] = [
  { scenario: 'killed', title: 'a rank that is killed is named', others: 'RANK_LOST', named: true },
  {
    scenario: 'late',
    title: 'a rank that does not come in time is named',
    others: 'COLLECTIVE_TIMEOUT',
    own: 'COLLECTIVE_TIMEOUT',
    named: true,
  },
]

/** What becomes of a group when one rank fails: nobody waits for ever, and everybody says why. */
export function failureGroup(subject: CollectivesSubject, options: { readonly processes: boolean }): CheckGroup {
  const failures = options.processes ? [...FAILURES, ...PROCESS_FAILURES] : FAILURES
  return { title: 'one rank fails', checks: failures.map((failure) => failureCheck(subject, failure)) }
}

function failureCheck({ launch, sums }: CollectivesSubject, failure: Failure): Check {
  const { scenario, title, others, own, named, message } = failure
  return {
    title,
    timeoutMs: TIMEOUT_MS,
    run: async () => {
      // A third rank, where somebody has to be waiting while one fails and another is late.
      const worldSize = scenario === 'abort-signal' ? 3 : 2
      const outcomes = await launch(worldSize, { scenario, sums })
      const last = worldSize - 1
      for (const outcome of outcomes.slice(0, last)) {
        const { error, later } = reportOf(outcome)
        assert.equal(error.code, others, `rank ${outcome.rank}: ${error.message}`)
        assert.notEqual(later, 'none', `a later operation of rank ${outcome.rank} fails as well`)
        if (named) assert.deepEqual(error.ranks, [last], `rank ${outcome.rank} names the rank: ${error.message}`)
        if (message !== undefined) assert.match(error.message, message)
      }
      const misbehaved = outcomes[last] as CollectivesOutcome
      if (own === undefined) assert.equal(misbehaved.value, undefined)
      else assert.equal(reportOf(misbehaved).error.code, own, `rank ${last}`)
    },
  }
}

function reportOf({ rank, value, error, exit }: CollectivesOutcome): CollectivesReport {
  if (value !== undefined) return value
  throw new Error(`rank ${rank}: ${error?.message ?? `ended with ${JSON.stringify(exit)}`}`)
}
