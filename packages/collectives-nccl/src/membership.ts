import { readFileSync } from 'node:fs'
import { hostname } from 'node:os'
import { type ProcessState, pidNamespace, processState, RankwiseError } from '@rankwise/core'
import { failureError, lost, nameRanks, type Verdict } from '@rankwise/core/collectives'
import type { ScopedStore } from './scoped-store.ts'

/** What must be equal on all ranks, because it decides which calls of NCCL they make. */
export interface Settings {
  readonly ncclVersion: string
  readonly checkFirst: string
  readonly stagingBytes: number
  readonly allowSharedGpu: boolean
}

/** What a rank tells of itself before NCCL is started. */
export interface Member {
  readonly rank: number
  readonly hostname: string
  /** The boot of the machine: the same in all its containers. */
  readonly machine: string
  /** Processes can look at each other if they are in one. */
  readonly pidNamespace: string
  readonly pid: number
  /** See `ProcessState`. */
  readonly startTime: string
  /** As `0000:17:00.0`. */
  readonly pciBusId: string
  readonly settings: Settings
}

/** A rank that cannot take part says why, so that the others need not wait. */
type Card = Member | { readonly rank: number; readonly refused: Verdict }

/** This process as a member. */
export function describeSelf(rank: number, pciBusId: string, settings: Settings): Member {
  return {
    rank,
    hostname: hostname(),
    machine: readFileSync('/proc/sys/kernel/random/boot_id', 'latin1').trim(),
    pidNamespace: pidNamespace(),
    pid: process.pid,
    startTime: (processState(process.pid) as ProcessState).startTime,
    pciBusId,
    settings,
  }
}

/** Tells the others that this rank cannot take part. */
export async function refuse(store: ScopedStore, rank: number, error: unknown): Promise<void> {
  await store.set(`members/${rank}`, { rank, refused: refusalOf(rank, error) } satisfies Card)
}

/** Resolves when every rank has come, whether it takes part or not, or the signal is aborted. */
export async function waitForCards(store: ScopedStore, worldSize: number, signal: AbortSignal): Promise<void> {
  const ranks = Array.from({ length: worldSize }, (_, rank) => rank)
  await Promise.allSettled(ranks.map((rank) => store.get(`members/${rank}`, { signal })))
}

/**
 * Tells the others of this rank and waits for all of them.
 *
 * @param signal ends the wait
 * @throws RankwiseError `RENDEZVOUS_TIMEOUT` with the ranks that did not come, `RANK_LOST` when a rank cannot take part
 */
export async function exchangeMembers(
  store: ScopedStore,
  self: Member,
  worldSize: number,
  signal: AbortSignal,
): Promise<readonly Member[]> {
  await store.set(`members/${self.rank}`, self satisfies Card)
  const found = new AbortController()
  const either = AbortSignal.any([signal, found.signal])
  const cards = await Promise.allSettled(
    Array.from({ length: worldSize }, async (_, rank) => {
      const card = await store.get<Card>(`members/${rank}`, { signal: either })
      if ('refused' in card) found.abort()
      return card
    }),
  )
  const came = cards.flatMap((card) => (card.status === 'fulfilled' ? [card.value] : []))
  const refusal = came.find((card) => 'refused' in card)
  if (refusal !== undefined) throw cannotJoin(refusal.rank, refusal.refused)
  const missing = cards.flatMap(({ status }, rank) => (status === 'rejected' ? [rank] : []))
  if (missing.length === 0) return came as Member[]
  const { reason } = cards[missing[0] as number] as PromiseRejectedResult
  throw isTimeout(reason, signal) ? notComplete(missing, worldSize) : reason
}

/**
 * Gives all ranks the identifier that rank 0 creates.
 *
 * @param signal ends the wait
 * @throws RankwiseError `RENDEZVOUS_TIMEOUT`, `RANK_LOST` when rank 0 could not create it
 */
export async function shareUniqueId(
  store: ScopedStore,
  rank: number,
  create: () => Uint8Array,
  signal: AbortSignal,
): Promise<Uint8Array> {
  if (rank === 0) {
    try {
      const id = create()
      await store.set('unique-id', { id: Buffer.from(id).toString('base64') })
      return id
    } catch (error) {
      await store.set('unique-id', { refused: refusalOf(0, error) }).catch(() => {})
      throw error
    }
  }
  try {
    const answer = await store.get<{ id: string } | { refused: Verdict }>('unique-id', { signal })
    if ('refused' in answer) throw cannotJoin(0, answer.refused)
    return new Uint8Array(Buffer.from(answer.id, 'base64'))
  } catch (error) {
    throw isTimeout(error, signal) ? notComplete([0], 1) : error
  }
}

/**
 * Refuses what NCCL would refuse later with fewer words, or not at all.
 *
 * @throws RankwiseError `NCCL_OPTIONS` when ranks differ, `NCCL_SHARED_GPU` when two ranks would use one GPU
 */
export function requireCompatible(members: readonly Member[], canShareGpus: boolean): void {
  requireEqualSettings(members)
  for (const sharing of groupByGpu(members)) {
    if (sharing.length > 1) requireSharingAllowed(sharing, canShareGpus)
  }
}

function requireEqualSettings(members: readonly Member[]): void {
  const [first] = members as [Member]
  for (const name of Object.keys(first.settings) as (keyof Settings)[]) {
    if (members.every(({ settings }) => settings[name] === first.settings[name])) continue
    throw new RankwiseError('NCCL_OPTIONS', `the ranks differ in ${name}`, {
      actual: Object.fromEntries(members.map(({ rank, settings }) => [`rank ${rank}`, settings[name]])),
      rule: 'all ranks have the same version of NCCL and the same options',
    })
  }
}

function groupByGpu(members: readonly Member[]): readonly (readonly Member[])[] {
  const groups = new Map<string, Member[]>()
  for (const member of members) {
    const gpu = `${member.machine} ${member.pciBusId}`
    groups.set(gpu, [...(groups.get(gpu) ?? []), member])
  }
  return [...groups.values()]
}

function requireSharingAllowed(sharing: readonly Member[], canShareGpus: boolean): void {
  const [{ pciBusId, hostname: host, settings }] = sharing as [Member]
  if (settings.allowSharedGpu && canShareGpus) return
  const ranks = sharing.map(({ rank }) => rank)
  throw new RankwiseError('NCCL_SHARED_GPU', `${nameRanks(ranks)} would use one GPU`, {
    where: `${host}, GPU ${pciBusId}`,
    actual: { ranks, pciBusId, ncclVersion: settings.ncclVersion, allowSharedGpu: settings.allowSharedGpu },
    rule: 'one GPU for each rank; sharing one takes allowSharedGpu and NCCL 2.30 or later',
    remedy: 'start fewer ranks, or give each its own GPU with CUDA_VISIBLE_DEVICES or the option device',
  })
}

function refusalOf(rank: number, error: unknown): Verdict {
  const code = error instanceof RankwiseError ? error.code : 'UNEXPECTED'
  const [what = ''] = (error instanceof Error ? error.message : String(error)).split('\n')
  return { code, what, ranks: [rank] }
}

function cannotJoin(rank: number, { what }: Verdict): RankwiseError {
  return failureError(lost([rank], `rank ${rank} cannot join: ${what}`), 'rendezvous')
}

/** Whether this rank's patience or that of the store is over: both last for `timeoutMs`. */
function isTimeout(error: unknown, signal: AbortSignal): boolean {
  return signal.aborted || (error instanceof RankwiseError && error.code === 'RENDEZVOUS_TIMEOUT')
}

function notComplete(missing: readonly number[], worldSize: number): RankwiseError {
  return new RankwiseError('RENDEZVOUS_TIMEOUT', `${nameRanks(missing)} did not join the group in time`, {
    actual: { joined: worldSize - missing.length, worldSize },
    rule: 'every rank joins within timeoutMs',
    remedy: 'check that all ranks were started with one store, and look at the output of the missing ones',
  })
}
