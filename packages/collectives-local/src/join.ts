import { pidNamespace, RankwiseError, type Rendezvous, type Store } from '@rankwise/core'
import type { Arena, ArenaLocation } from './arena.ts'
import { nameRanks } from './failure.ts'
import type { Member } from './failure-detector.ts'
import { Meeting } from './meeting.ts'
import { errorMessage, type Fields, fieldsOf, unreadable } from './message.ts'

/** Rank 0, and what the others must have in common with it. */
interface Host extends Member {
  readonly worldSize: number
  readonly namespace: string
}

/** What rank 0 tells the others once all have come. */
interface Invitation {
  readonly members: readonly Member[]
  readonly arena: ArenaLocation
}

/**
 * Rank 0: waits in the store for the other ranks, tells them where the arena is, and resolves with all members, in rank
 * order, when every rank has opened it. When a rank fails or dies meanwhile, all fail.
 *
 * @throws RankwiseError `RENDEZVOUS_TIMEOUT`, `RENDEZVOUS_REFUSED`, `RANK_LOST`, or what a rank failed with
 */
export async function hostGroup(
  store: Store,
  { worldSize, timeoutMs }: Rendezvous,
  self: Member,
  arena: ArenaLocation,
): Promise<readonly Member[]> {
  using meeting = new Meeting(store, timeoutMs)
  const host: Host = { ...self, worldSize, namespace: pidNamespace() }
  const guests: Member[] = []
  let nextAnswer = 'invitation'
  try {
    await meeting.send('host', host)
    const refusal = meeting.receive('refusal')
    await meeting.unlessLost(Promise.race([gather(meeting, worldSize, guests), refusal]), guests)
    const members = [self, ...guests].sort((a, b) => a.rank - b.rank)
    const invitation: Invitation = { members, arena }
    await meeting.send('invitation', invitation)
    nextAnswer = 'complete'
    await meeting.unlessLost(Promise.all(guests.map(({ rank }) => meeting.receive(`ready/${rank}`))), guests)
    await meeting.send('complete', {})
    return members
  } catch (cause) {
    const error = meeting.isOver ? incomplete(worldSize, guests, cause) : cause
    await meeting.send(nextAnswer, errorMessage(error))
    throw error
  }
}

/** Collects the other ranks in `guests`, as they come. */
async function gather(meeting: Meeting, worldSize: number, guests: Member[]): Promise<void> {
  const ranks = Array.from({ length: worldSize - 1 }, (_, i) => i + 1)
  await Promise.all(
    ranks.map(async (rank) => {
      const message = await meeting.receive(`hello/${rank}`)
      if (!isMember(message)) throw unreadable(`rank ${rank}`)
      guests.push(message)
    }),
  )
}

/**
 * Any other rank: presents itself in the store, opens the arena that rank 0 names and resolves when all ranks have.
 *
 * @param open opens the arena; it is destroyed again if the group does not get complete
 * @throws RankwiseError `RENDEZVOUS_TIMEOUT`, `RENDEZVOUS_REFUSED`, `TRANSPORT_UNSUPPORTED`, `RANK_LOST`, or what rank 0
 * or `open` failed with
 */
export async function joinGroup(
  store: Store,
  { rank, worldSize, timeoutMs }: Rendezvous,
  self: Member,
  open: (location: ArenaLocation) => Arena,
): Promise<{ arena: Arena; members: readonly Member[] }> {
  using meeting = new Meeting(store, timeoutMs)
  let arena: Arena | undefined
  try {
    if ((await meeting.claim(rank)) > 1) throw refused(`rank ${rank} has already joined the group`, { RANK: rank })
    const host = await meetHost(meeting, rank, worldSize)
    await meeting.send(`hello/${rank}`, self)
    const invitation = await meeting.unlessLost(meeting.receive('invitation'), [host])
    if (!isInvitation(invitation, worldSize)) throw unreadable('the invitation of rank 0')
    arena = await telling(meeting, `ready/${rank}`, () => open(invitation.arena))
    await meeting.unlessLost(meeting.receive('complete'), [host])
    return { arena, members: invitation.members }
  } catch (error) {
    arena?.destroy()
    throw meeting.isOver ? notInvited(rank, timeoutMs, error) : error
  }
}

async function meetHost(meeting: Meeting, rank: number, worldSize: number): Promise<Host> {
  const host = await meeting.receive('host')
  if (!isHost(host)) throw unreadable('rank 0')
  const refusal = refusalOf(rank, worldSize, host)
  if (refusal === undefined) return host
  await meeting.send('refusal', errorMessage(refusal))
  throw refusal
}

/** Does something, and tells the others under a key that it is done, or why it is not. */
async function telling<T>(meeting: Meeting, key: string, work: () => T): Promise<T> {
  let result: T
  try {
    result = work()
  } catch (error) {
    await meeting.send(key, errorMessage(error))
    throw error
  }
  await meeting.send(key, {})
  return result
}

function refusalOf(rank: number, worldSize: number, host: Host): RankwiseError | undefined {
  if (worldSize !== host.worldSize) {
    return refused(`rank ${rank} has another world size than rank 0`, {
      WORLD_SIZE: worldSize,
      'on rank 0': host.worldSize,
    })
  }
  if (pidNamespace() === host.namespace) return undefined
  return new RankwiseError('TRANSPORT_UNSUPPORTED', `rank ${rank} runs in another pid namespace than rank 0`, {
    where: 'rendezvous',
    actual: { namespace: pidNamespace(), 'on rank 0': host.namespace },
    rule: "ranks of 'local' collectives see each other in /proc",
    remedy: 'start all ranks on one machine, inside one container',
  })
}

function isMember(fields: Fields): fields is Fields & Member {
  return Number.isInteger(fields.rank) && Number.isInteger(fields.pid) && typeof fields.startTime === 'string'
}

function isHost(fields: Fields): fields is Fields & Host {
  return isMember(fields) && 'worldSize' in fields && 'namespace' in fields
}

function isInvitation(fields: Fields, worldSize: number): fields is Fields & Invitation {
  const { members, arena } = fields
  const hasAll = Array.isArray(members) && members.length === worldSize
  return hasAll && members.every((member) => isMember(fieldsOf(member) ?? {})) && fieldsOf(arena) !== undefined
}

function incomplete(worldSize: number, guests: readonly Member[], cause: unknown): RankwiseError {
  const ranks = Array.from({ length: worldSize - 1 }, (_, i) => i + 1)
  const missing = ranks.filter((rank) => !guests.some((guest) => guest.rank === rank))
  const what = missing.length > 0 ? `${nameRanks(missing)} did not join the group in time` : 'a rank did not get ready'
  return new RankwiseError('RENDEZVOUS_TIMEOUT', what, {
    where: 'rendezvous',
    actual: { worldSize, joined: guests.length + 1 },
    rule: 'every rank joins within timeoutMs',
    remedy: 'check that every rank was started, with the same WORLD_SIZE, MASTER_ADDR, MASTER_PORT and RANKWISE_TOKEN',
    cause,
  })
}

function notInvited(rank: number, timeoutMs: number, cause: unknown): RankwiseError {
  return new RankwiseError('RENDEZVOUS_TIMEOUT', 'the group did not get complete in time', {
    where: 'rendezvous',
    actual: { rank, timeoutMs },
    rule: 'every rank joins within timeoutMs',
    remedy: 'check that every rank was started, and look at the output of rank 0',
    cause,
  })
}

function refused(what: string, actual: Readonly<Record<string, unknown>>): RankwiseError {
  return new RankwiseError('RENDEZVOUS_REFUSED', what, {
    where: 'rendezvous',
    actual,
    rule: 'every rank of a group has its own RANK and the same WORLD_SIZE',
  })
}
