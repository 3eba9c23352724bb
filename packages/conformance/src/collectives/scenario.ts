import { createHash } from 'node:crypto'
import { setTimeout as delay } from 'node:timers/promises'
import { type Collectives, type DType, RankwiseError, Tensor, viewAs } from '@rankwise/core'
import { relativeRms } from '../compare/compare.ts'
import { firstDifference } from './oracle.ts'
import { bytesOf, expectedOn, type Plan, plansFor, tensorsOf } from './plan.ts'

/** What the ranks of a group do together. */
export type Scenario = 'operations' | 'mismatch' | 'left' | 'abort-signal' | 'abort' | 'killed' | 'late'

/** What every rank is told. */
export interface CollectivesTask {
  readonly scenario: Scenario
  /** How sums are compared. */
  readonly sums: 'rank-order' | 'close'
}

/** What one rank saw; structured-cloneable. */
export interface CollectivesReport {
  /** What was wrong, by subject. */
  readonly wrong: Readonly<Record<string, readonly string[]>>
  /** Of all results in order, to be compared between ranks. */
  readonly hash: string
  /** Code and message of the error that an operation ended with; `none` where it did not. */
  readonly error: { readonly code: string; readonly message: string; readonly ranks: readonly number[] }
  /** Of an operation after that one. */
  readonly later: string
}

const NONE = { code: 'none', message: '', ranks: [] }

/** The part of one rank. The group is destroyed at the end. */
export async function runScenario(collectives: Collectives, task: CollectivesTask): Promise<CollectivesReport> {
  if (task.scenario === 'operations') return runOperations(collectives, task)
  const last = collectives.worldSize - 1
  const isLast = collectives.rank === last
  await collectives.barrier()
  // The one that aborts has to be waiting: rank 0 keeps it waiting for longer than its signal takes.
  if (task.scenario === 'abort-signal' && collectives.rank === 0) await delay(2000)
  const error = await errorOf(isLast ? misbehave(collectives, task.scenario) : allReduce(collectives))
  const later = (await errorOf(collectives.barrier())).code
  await collectives.destroy()
  return { wrong: {}, hash: '', error, later }
}

function allReduce(collectives: Collectives, options?: { readonly signal: AbortSignal }): Promise<void> {
  return collectives.allReduce([Tensor.float32([4], [1, 2, 3, 4])], options)
}

/** What the last rank does while the others wait for it in an all-reduce. */
async function misbehave(collectives: Collectives, scenario: Scenario): Promise<void> {
  if (scenario === 'mismatch') return collectives.allReduce([Tensor.float32([5], [1, 2, 3, 4, 5])])
  if (scenario === 'abort-signal') return allReduce(collectives, { signal: AbortSignal.timeout(100) })
  await delay(100)
  if (scenario === 'left') return collectives.destroy()
  if (scenario === 'abort') return collectives.abort(new Error('out of paper'))
  if (scenario === 'killed') process.kill(process.pid, 'SIGKILL')
  // The event loop stands still, as in a native call.
  Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 5000)
  return allReduce(collectives)
}

async function errorOf(operation: Promise<unknown>): Promise<CollectivesReport['error']> {
  return operation.then(
    () => NONE,
    (error: unknown) => {
      if (!(error instanceof RankwiseError)) return { code: 'not a RankwiseError', message: String(error), ranks: [] }
      const { ranks } = error.actual
      return { code: error.code, message: error.message, ranks: Array.isArray(ranks) ? ranks : [] }
    },
  )
}

async function runOperations(collectives: Collectives, { sums }: CollectivesTask): Promise<CollectivesReport> {
  const hash = createHash('sha256')
  const plans = plansFor(collectives.worldSize)
  const check = async (plan: Plan) => checked(collectives, plan, await perform(collectives, plan, hash), sums)
  const results: string[] = []
  for (const plan of plans) results.push(...(await check(plan)))
  const some = plans.filter(({ kind }) => kind === 'allReduce').slice(0, 12)
  const wrong = {
    results,
    // The hash is not to depend on which one ends first.
    order: (
      await Promise.all(
        some.map((plan) => perform(collectives, plan).then((all) => checked(collectives, plan, all, sums))),
      )
    ).flat(),
    kept: await checkKept(collectives),
    barrier: await checkBarrier(collectives),
    refusals: await checkRefusals(collectives),
    after: [] as string[],
  }
  wrong.after = await check(some[0] as Plan)
  await collectives.destroy()
  await collectives.destroy()
  const later = (await errorOf(collectives.barrier())).code
  return { wrong, hash: hash.digest('hex'), error: NONE, later }
}

/** What this rank holds after an operation. */
async function perform(
  collectives: Collectives,
  plan: Plan,
  hash?: ReturnType<typeof createHash>,
): Promise<readonly Uint8Array[]> {
  const { kind, op, source } = plan
  const tensors = tensorsOf(plan, collectives.rank)
  const [tensor] = tensors as [Tensor]
  const held = async (): Promise<readonly Tensor[]> => {
    if (kind === 'allGather') return [await collectives.allGather(tensor)]
    if (kind === 'reduceScatter') return [await collectives.reduceScatter(tensor, { op })]
    if (kind === 'allReduce') await collectives.allReduce(tensors, { op })
    else await collectives.broadcast(tensor, { source })
    return tensors
  }
  const results = (await held()).map(bytesOf)
  // Ranks hold different shares of a reduce-scatter.
  if (kind !== 'reduceScatter') for (const bytes of results) hash?.update(bytes)
  return results
}

function checked(
  { rank, worldSize }: Collectives,
  plan: Plan,
  results: readonly Uint8Array[],
  sums: CollectivesTask['sums'],
): string[] {
  const expected = expectedOn(plan, rank, worldSize)
  return plan.types.flatMap(({ dtype, shape }, i) => {
    const place = `${plan.kind} ${plan.op} ${dtype}[${shape.join(', ')}], tensor ${i}`
    const [actual, whole] = [results[i] as Uint8Array, expected[i] as Uint8Array]
    const isSum = plan.op === 'sum' && (plan.kind === 'allReduce' || plan.kind === 'reduceScatter')
    if (isSum && sums === 'close') return closeSums(dtype, actual, whole) ? [] : [`${place}: sums are not close`]
    const index = firstDifference(dtype, actual, whole)
    return index === undefined ? [] : [`${place}: element ${index} is not what the ranks brought, in rank order`]
  })
}

/** Another order rounds otherwise; special values may overflow on the way, so only finite ones are compared. */
function closeSums(dtype: DType, actual: Uint8Array, expected: Uint8Array): boolean {
  if (actual.length !== expected.length) return false
  const [a, e] = [actual, expected].map((bytes) => {
    const data = viewAs(dtype, bytes)
    return new Tensor(dtype, [data.length], data as never).cast('float64').data
  }) as [Float64Array, Float64Array]
  const finite = [...e.keys()].filter((i) => Number.isFinite(a[i]) && Number.isFinite(e[i]))
  const values = (of: Float64Array) => finite.map((i) => of[i] as number)
  return relativeRms(values(a), values(e)) <= (dtype === 'bfloat16' ? 1e-2 : 2e-3)
}

/** A result is its own: the next call of the same shape neither changes it nor gives it again. */
async function checkKept(collectives: Collectives): Promise<string[]> {
  const { worldSize } = collectives
  const wrong: string[] = []
  const kinds: readonly (readonly [string, (value: number) => Promise<Tensor>, (value: number) => number])[] = [
    ['allGather', (value) => collectives.allGather(Tensor.float32([1], [value])), (value) => value],
    [
      'reduceScatter',
      (value) => collectives.reduceScatter(Tensor.float32([worldSize], new Array(worldSize).fill(value))),
      (value) => worldSize * value,
    ],
  ]
  for (const [kind, call, expected] of kinds) {
    const results = [await call(1), await call(2), await call(3)]
    for (const [i, { data }] of results.entries()) {
      if ([...data].some((value) => value !== expected(i + 1))) wrong.push(`${kind}: result ${i} of 3 is [${data}]`)
    }
  }
  return wrong
}

/** Nobody leaves a barrier before the last has come. */
async function checkBarrier(collectives: Collectives): Promise<string[]> {
  const { rank, worldSize } = collectives
  if (rank === worldSize - 1) await delay(200)
  const entered = Date.now()
  await collectives.barrier()
  const times = await collectives.allGather(new Tensor('float64', [1, 2], Float64Array.of(entered, Date.now())))
  const data = times.data as Float64Array
  const [last, first] = [
    Math.max(...data.filter((_, i) => i % 2 === 0)),
    Math.min(...data.filter((_, i) => i % 2 === 1)),
  ]
  return first >= last ? [] : [`a rank left ${last - first} ms before the last one came`]
}

/** What is refused on every rank is refused before anything is sent, and does no harm. */
async function checkRefusals(collectives: Collectives): Promise<string[]> {
  const { worldSize } = collectives
  const scalar = Tensor.float32([], [1])
  const odd = Tensor.zeros('float32', [worldSize + 1, 2])
  const refused: readonly (readonly [string, string, () => Promise<unknown>])[] = [
    ['an unknown reduction', 'COLLECTIVE_OP', () => collectives.allReduce([odd], { op: 'mean' as 'sum' })],
    ['a source that is no rank', 'COLLECTIVE_SOURCE', () => collectives.broadcast(odd, { source: worldSize })],
    ['a gathered scalar', 'COLLECTIVE_SHAPE', () => collectives.allGather(scalar)],
    ['rows that cannot be dealt out', 'COLLECTIVE_SHAPE', () => collectives.reduceScatter(odd)],
    ['a reduced bool', 'COLLECTIVE_DTYPE', () => collectives.allReduce([Tensor.zeros('bool', [2])])],
  ]
  const wrong: string[] = []
  // One rank can take any number of rows.
  const applicable = refused.filter(([what]) => worldSize > 1 || !what.startsWith('rows'))
  for (const [what, code, operation] of applicable) {
    const error = await errorOf(operation())
    if (error.code !== code) wrong.push(`${what}: ${error.code} instead of ${code}`)
  }
  return wrong
}
