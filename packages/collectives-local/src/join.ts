import { once } from 'node:events'
import { createConnection, createServer, type Server, type Socket } from 'node:net'
import { setTimeout } from 'node:timers/promises'
import { type EnvironmentRendezvous, RankwiseError } from '@rankwise/core'
import type { Arena, ArenaLocation } from './arena.ts'
import type { Member } from './failure-detector.ts'
import { type Hello, Lobby } from './lobby.ts'
import { ConnectionError, errorMessage, fieldsOf, receive, rethrowErrorMessage, send } from './message.ts'

/** What rank 0 tells the others once all have come. */
interface Invitation {
  readonly members: readonly Member[]
  readonly arena: ArenaLocation
}

/** How long rank 0 tries for its port: a connection attempt of another rank may hold it for a moment. */
const BIND_MS = 2_000
const BIND_RETRY_MS = 50
const MAX_RETRY_MS = 200
const INVITATION_LIMIT = 2 ** 20

/**
 * Rank 0: waits for the other ranks at `masterAddr:masterPort`, tells them where the arena is, and resolves with all
 * members, in rank order, when every rank has opened it. The port is free again afterwards.
 *
 * @throws RankwiseError `RENDEZVOUS_TIMEOUT`, `RENDEZVOUS_ADDRESS`, `RANK_LOST`, or what a rank failed with
 */
export async function hostGroup(
  rendezvous: EnvironmentRendezvous,
  self: Member,
  arena: ArenaLocation,
): Promise<readonly Member[]> {
  const lobby = new Lobby(rendezvous, self, AbortSignal.timeout(rendezvous.timeoutMs))
  const server = await listen(rendezvous, (socket) => lobby.greet(socket))
  try {
    const members = await lobby.members()
    const invitation: Invitation = { members, arena }
    lobby.broadcast({ invitation })
    await lobby.allReady()
    lobby.broadcast({ complete: true })
    return members
  } catch (error) {
    lobby.broadcast(errorMessage(error))
    throw error
  } finally {
    server.close()
    lobby.close()
  }
}

/**
 * Any other rank: presents itself to rank 0, again until `timeoutMs` is over if rank 0 is not there yet, opens the
 * arena and resolves when all ranks have.
 *
 * @param open opens the arena; it is destroyed again if the group does not get complete
 * @throws RankwiseError `RENDEZVOUS_TIMEOUT`, `RENDEZVOUS_REFUSED`, `RANK_LOST`, or what rank 0 or `open` failed with
 */
export async function joinGroup(
  rendezvous: EnvironmentRendezvous,
  self: Member,
  open: (location: ArenaLocation) => Arena,
): Promise<{ arena: Arena; members: readonly Member[] }> {
  const signal = AbortSignal.timeout(rendezvous.timeoutMs)
  const { socket, invitation } = await knock(rendezvous, self, signal)
  let arena: Arena | undefined
  try {
    arena = open(invitation.arena)
    send(socket, { ready: true })
    rethrowErrorMessage(await receive(socket, INVITATION_LIMIT, signal), 'rendezvous')
    return { arena, members: invitation.members }
  } catch (error) {
    arena?.destroy()
    send(socket, errorMessage(error))
    if (error instanceof ConnectionError) throw hostLost(error)
    throw signal.aborted ? notInvited(rendezvous, error) : error
  } finally {
    socket.destroySoon()
  }
}

async function listen(
  { masterAddr, masterPort }: EnvironmentRendezvous,
  onConnection: (socket: Socket) => Promise<void>,
): Promise<Server> {
  const end = performance.now() + BIND_MS
  for (;;) {
    const server = createServer((socket) => void onConnection(socket))
    try {
      server.listen(masterPort, masterAddr)
      await once(server, 'listening')
      return server
    } catch (cause) {
      const isTaken = (cause as NodeJS.ErrnoException).code === 'EADDRINUSE'
      if (isTaken && performance.now() < end) await setTimeout(BIND_RETRY_MS)
      else throw addressUnusable(`${masterAddr}:${masterPort}`, cause)
    }
  }
}

async function knock(
  rendezvous: EnvironmentRendezvous,
  self: Member,
  signal: AbortSignal,
): Promise<{ socket: Socket; invitation: Invitation }> {
  const hello: Hello = { rankwise: 1, worldSize: rendezvous.worldSize, token: rendezvous.token ?? '', ...self }
  for (let delay = 10; ; delay = Math.min(delay * 2, MAX_RETRY_MS)) {
    const socket = createConnection(rendezvous.masterPort, rendezvous.masterAddr)
    socket.on('error', () => {})
    try {
      return { socket, invitation: await converse(socket, hello, signal) }
    } catch (error) {
      socket.destroy()
      if (error instanceof RankwiseError) throw error
      if (signal.aborted) throw notInvited(rendezvous, error)
      await setTimeout(delay)
    }
  }
}

/** @throws ConnectionError when whoever answers is not the rank 0 that this rank looks for */
async function converse(socket: Socket, hello: Hello, signal: AbortSignal): Promise<Invitation> {
  send(socket, hello)
  const message = await receive(socket, INVITATION_LIMIT, signal)
  rethrowErrorMessage(message, 'rendezvous')
  const { invitation } = fieldsOf(message)
  const { members, arena } = fieldsOf(invitation)
  const isInvitation = Array.isArray(members) && members.length === hello.worldSize && typeof arena === 'object'
  if (!isInvitation) throw new ConnectionError('the answer is no invitation')
  return invitation as Invitation
}

function addressUnusable(where: string, cause: unknown): RankwiseError {
  const { code } = cause as NodeJS.ErrnoException
  return new RankwiseError('RENDEZVOUS_ADDRESS', 'rank 0 cannot listen here', {
    where,
    actual: { reason: code },
    rule: 'MASTER_ADDR is an address of this machine and MASTER_PORT is free',
    remedy: 'choose another MASTER_PORT, or start the ranks with `rankwise run`, which finds a free one',
    cause,
  })
}

function notInvited({ masterAddr, masterPort, rank, timeoutMs }: EnvironmentRendezvous, cause: unknown): RankwiseError {
  return new RankwiseError('RENDEZVOUS_TIMEOUT', 'the group did not get complete in time', {
    where: `${masterAddr}:${masterPort}`,
    actual: { rank, timeoutMs },
    rule: 'every rank joins within timeoutMs',
    remedy: 'check that rank 0 was started, with the same MASTER_ADDR, MASTER_PORT and RANKWISE_TOKEN',
    cause,
  })
}

function hostLost(cause: unknown): RankwiseError {
  return new RankwiseError('RANK_LOST', 'rank 0 was lost before the group was complete', {
    where: 'rendezvous',
    actual: { ranks: [0] },
    remedy: 'look at the output of rank 0 for the first error',
    cause,
  })
}
