import { RankwiseError, type Rendezvous } from '@rankwise/core'
import { nameRanks } from '@rankwise/core/collectives'
import type { Arena, ArenaLocation } from './arena.ts'
import type { Meeting } from './meeting.ts'
import { type Member, thisMember } from './member.ts'
import { errorMessage, type Fields, fieldsOf, unreadable } from './message.ts'
import type { TransportChoice } from './transport.ts'
import {
  type Ability,
  commonChoice,
  firstObstacle,
  type Obstacle,
  obstacleError,
  obstacleOf,
} from './transport-choice.ts'

/** Rank 0, and what the others must have in common with it. */
interface Host extends Member {
  readonly worldSize: number
}

/** An arena, or what is in the way of one; neither when none was wanted. */
interface Made {
  readonly arena?: Arena
  readonly location?: ArenaLocation
  readonly obstacle?: Obstacle
}

/** Any other rank, and what it can do. */
interface Guest extends Member, Ability {}

/** What rank 0 tells the others once all have come: who is there, and where the arena is, if it could make one. */
interface Invitation {
  readonly members: readonly Member[]
  readonly arena?: ArenaLocation | undefined
  /** Whether there is no other way than the arena. */
  readonly needsArena: boolean
}

/** How the ranks exchange tensors, as rank 0 has decided. */
interface Decision {
  readonly transport: 'shm' | 'tcp'
  /** Why, in words. */
  readonly reason: string
  /** What only those know who were told, for connections over TCP. */
  readonly secret: string
  readonly slotBytes: number
}

/** What the ranks have agreed on. With an arena they share memory. */
export interface Agreement extends Decision {
  /** All ranks, in rank order. */
  readonly members: readonly Member[]
  readonly arena: Arena | undefined
}

/** What rank 0 brings. */
export interface HostPlan {
  readonly ability: Ability
  /** Makes an arena; undefined where there is an obstacle. */
  readonly create: (() => { readonly arena: Arena; readonly location: ArenaLocation }) | undefined
  readonly secret: string
  readonly slotBytes: number
}

/**
 * Rank 0: waits in the store for the other ranks and decides what carries tensors: shared memory, when all can open the
 * arena that it makes, or else TCP. When a rank fails or dies meanwhile, all fail.
 *
 * @throws RankwiseError `RENDEZVOUS_TIMEOUT`, `RENDEZVOUS_REFUSED`, `RANK_LOST`, `ABORTED`, or what a rank failed with
 */
export async function hostGroup(meeting: Meeting, { worldSize }: Rendezvous, plan: HostPlan): Promise<Agreement> {
  const self = thisMember(0)
  const host: Host = { ...self, worldSize }
  const guests: Guest[] = []
  let nextAnswer = 'invitation'
  let arena: Arena | undefined
  try {
    await meeting.send('host', host)
    const refusal = meeting.receive('refusal') as Promise<never>
    await meeting.unlessLost(Promise.race([gather(meeting, worldSize, guests), refusal]), guests)
    guests.sort((a, b) => a.rank - b.rank)
    const abilities = [plan.ability, ...guests]
    const choice = commonChoice(abilities)
    const made = makeArena(choice, abilities, plan.create)
    arena = made.arena
    const members = [self, ...guests.map(memberOf)]
    const invitation: Invitation = { members, arena: made.location, needsArena: choice === 'shm' }
    await meeting.send('invitation', invitation)
    nextAnswer = 'decision'
    const opened = arena && meeting.unlessLost(Promise.race([whenOpened(meeting, guests), refusal]), guests)
    const obstacle = made.obstacle ?? (await opened)
    const transport = arena === undefined || obstacle !== undefined ? 'tcp' : 'shm'
    const { secret, slotBytes } = plan
    const decision: Decision = { transport, reason: reasonFor(choice, obstacle), secret, slotBytes }
    await meeting.send('decision', decision)
    return { ...decision, members, arena: keptArena(arena, decision) }
  } catch (cause) {
    arena?.destroy()
    const error = meeting.isOver ? incomplete(worldSize, guests, cause) : cause
    await meeting.send(nextAnswer, meeting.isAborted ? abortMessage(0) : errorMessage(error))
    throw error
  }
}

/** Makes an arena, unless the ranks do not want it or one of them cannot have it. */
function makeArena(choice: TransportChoice, abilities: readonly Ability[], create: HostPlan['create']): Made {
  if (choice === 'tcp') return {}
  const made = firstObstacle(abilities) ?? attempt(0, create)
  if (!('what' in made)) return made
  if (choice === 'shm') throw obstacleError(made)
  return { obstacle: made }
}

/** Resolves when all guests have opened the arena, or tried to. @returns what was in the way of the first one */
async function whenOpened(meeting: Meeting, guests: readonly Guest[]): Promise<Obstacle | undefined> {
  const ready = await Promise.all(guests.map(({ rank }) => meeting.receive(`ready/${rank}`)))
  return ready.map(({ obstacle }) => obstacle as Obstacle | undefined).find((obstacle) => obstacle !== undefined)
}

/** The arena is of no use to ranks that exchange over TCP. */
function keptArena(arena: Arena | undefined, { transport }: Decision): Arena | undefined {
  if (transport === 'shm') return arena
  arena?.destroy()
  return undefined
}

function memberOf({ rank, pid, startTime, namespace }: Guest): Member {
  return { rank, pid, startTime, namespace }
}

/** Collects the other ranks in `guests`, as they come. */
async function gather(meeting: Meeting, worldSize: number, guests: Guest[]): Promise<void> {
  const ranks = Array.from({ length: worldSize - 1 }, (_, i) => i + 1)
  await Promise.all(
    ranks.map(async (rank) => {
      const message = await meeting.receive(`hello/${rank}`)
      if (!isMember(message)) throw unreadable(`rank ${rank}`)
      guests.push(message as unknown as Guest)
    }),
  )
}

function reasonFor(choice: TransportChoice, obstacle: Obstacle | undefined): string {
  if (choice !== 'auto') return `transport '${choice}' was asked for`
  return obstacle?.what ?? 'every rank can share memory'
}

/** Makes or opens an arena. @returns it, or why it could not */
function attempt<T>(rank: number, work: (() => T) | undefined): T | Obstacle {
  try {
    if (work === undefined) throw new RangeError(`rank ${rank} has no way to share memory`)
    return work()
  } catch (error) {
    const { code, what } = obstacleOf(error)
    return { code, what: `rank ${rank} cannot share memory: ${what}` }
  }
}

/** What any other rank brings. */
export interface GuestPlan {
  readonly ability: Ability
  /** Opens the arena of rank 0; undefined where there is an obstacle. */
  readonly open: ((location: ArenaLocation) => Arena) | undefined
}

/**
 * Any other rank: presents itself in the store, opens the arena if rank 0 names one, and resolves when rank 0 has decided.
 *
 * @throws RankwiseError `RENDEZVOUS_TIMEOUT`, `RENDEZVOUS_REFUSED`, `RANK_LOST`, `ABORTED`, or what rank 0 failed with
 */
export async function joinGroup(
  meeting: Meeting,
  { rank, worldSize, timeoutMs }: Rendezvous,
  { ability, open }: GuestPlan,
): Promise<Agreement> {
  let arena: Arena | undefined
  try {
    if ((await meeting.claim(rank)) > 1) throw refused(`rank ${rank} has already joined the group`, { RANK: rank })
    const host = await meetHost(meeting, rank, worldSize)
    const self = thisMember(rank)
    const obstacle = ability.obstacle ?? elsewhere(self, host)
    const guest: Guest = { ...self, ...ability, obstacle: ability.choice === 'tcp' ? undefined : obstacle }
    await meeting.send(`hello/${rank}`, guest)
    const invitation = await meeting.unlessLost(meeting.receive('invitation'), [host])
    if (!isInvitation(invitation, worldSize)) throw unreadable('the invitation of rank 0')
    arena = await openArena(meeting, rank, invitation, open)
    const decision = await meeting.unlessLost(meeting.receive('decision'), [host])
    if (!isDecision(decision)) throw unreadable('the decision of rank 0')
    const { transport, reason, secret, slotBytes } = decision
    return { transport, reason, secret, slotBytes, members: invitation.members, arena: keptArena(arena, decision) }
  } catch (error) {
    arena?.destroy()
    if (meeting.isAborted) await meeting.send('refusal', abortMessage(rank))
    throw meeting.isOver ? notInvited(rank, timeoutMs, error) : error
  }
}

/** Opens the arena of rank 0, if there is one, and tells how that went. */
async function openArena(
  meeting: Meeting,
  rank: number,
  { arena: location, needsArena }: Invitation,
  open: GuestPlan['open'],
): Promise<Arena | undefined> {
  if (location === undefined) return undefined
  const opened = attempt(rank, open && (() => open(location)))
  if (!('what' in opened)) {
    await meeting.send(`ready/${rank}`, {})
    return opened
  }
  if (!needsArena) {
    await meeting.send(`ready/${rank}`, { obstacle: opened })
    return undefined
  }
  const error = obstacleError(opened)
  await meeting.send(`ready/${rank}`, errorMessage(error))
  throw error
}

async function meetHost(meeting: Meeting, rank: number, worldSize: number): Promise<Host> {
  const host = await meeting.receive('host')
  if (!isHost(host)) throw unreadable('rank 0')
  if (worldSize === host.worldSize) return host
  const refusal = refused(`rank ${rank} has another world size than rank 0`, {
    WORLD_SIZE: worldSize,
    'on rank 0': host.worldSize,
  })
  await meeting.send('refusal', errorMessage(refusal))
  throw refusal
}

/** Ranks open the arena in /proc of rank 0, which is another one in another container. */
function elsewhere(self: Member, host: Member): Obstacle | undefined {
  if (self.namespace === host.namespace) return undefined
  return {
    code: 'TRANSPORT_UNSUPPORTED',
    what: `it runs in another pid namespace than rank 0 (${self.namespace}, on rank 0 ${host.namespace})`,
  }
}

/** What the others hear of a rank whose `signal` was aborted. */
function abortMessage(rank: number): unknown {
  return errorMessage(
    new RankwiseError('RANK_LOST', `rank ${rank} aborted the rendezvous`, { actual: { ranks: [rank] } }),
  )
}

function isMember(fields: Fields): fields is Fields & Member {
  const texts = [fields.startTime, fields.namespace]
  return (
    Number.isInteger(fields.rank) && Number.isInteger(fields.pid) && texts.every((text) => typeof text === 'string')
  )
}

function isHost(fields: Fields): fields is Fields & Host {
  return isMember(fields) && 'worldSize' in fields
}

function isInvitation(fields: Fields, worldSize: number): fields is Fields & Invitation {
  const { members } = fields
  const hasAll = Array.isArray(members) && members.length === worldSize
  return hasAll && members.every((member) => isMember(fieldsOf(member) ?? {}))
}

function isDecision(fields: Fields): fields is Fields & Decision {
  const { transport, reason, secret, slotBytes } = fields
  const texts = [reason, secret].every((text) => typeof text === 'string')
  return (transport === 'shm' || transport === 'tcp') && texts && Number.isInteger(slotBytes)
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
