import { type EnvironmentRendezvous, RankwiseError } from '@rankwise/core'
import type { Agreement } from './join.ts'
import type { Reduce } from './kernel.ts'
import type { Meeting } from './meeting.ts'
import { Mesh, type PeerAddress } from './mesh.ts'
import { errorMessage, type Fields, unreadable } from './message.ts'
import { LOOPBACK, TcpTransport } from './tcp-transport.ts'

/** Nothing else keeps the process alive while it waits for connections. */
const ALIVE_MS = 2 ** 31 - 1

/**
 * Connects every two ranks, once they have agreed to. They find each other in the store.
 *
 * @throws RankwiseError `RENDEZVOUS_ADDRESS`, `RENDEZVOUS_TIMEOUT`, `RANK_LOST`, `ABORTED`, and what another rank failed with
 */
export async function connectRanks(
  meeting: Meeting,
  { rank, token = '', timeoutMs }: EnvironmentRendezvous,
  { members, secret, slotBytes }: Agreement,
  reduce: Reduce,
): Promise<TcpTransport> {
  // Both are needed: the token of the launch, and what rank 0 has told this group.
  const joint = `${token} ${secret}`
  const alive = setInterval(() => {}, ALIVE_MS)
  let mesh: Mesh | undefined
  let transport: TcpTransport | undefined
  try {
    mesh = await listen(meeting, rank, joint)
    const places = members.map(async (member) => placeOf(member.rank, await meeting.receive(`place/${member.rank}`)))
    const peers = await meeting.unlessLost(Promise.all(places), members)
    await meeting.unlessLost(mesh.connect(peers, meeting.signal), members)
    const pids = members.map(({ pid }) => pid)
    transport = new TcpTransport(
      { rank, pids, token: joint, reduce, chunkBytes: slotBytes, timeoutMs, label: '' },
      mesh,
    )
    await transport.ready(meeting.signal)
    return transport
  } catch (error) {
    const what = `rank ${rank} ${meeting.isAborted ? 'aborted the rendezvous' : 'could not join'}`
    const failure = { code: 'RANK_LOST', what, ranks: [rank] }
    if (transport === undefined) mesh?.broadcast({ failure })
    else transport.fail(failure)
    await (transport ?? mesh)?.close()
    throw meeting.isAborted || meeting.isOver ? ended(meeting, rank, error) : error
  } finally {
    clearInterval(alive)
  }
}

/** Listens, and tells the others where, or why not. */
async function listen(meeting: Meeting, rank: number, token: string): Promise<Mesh> {
  const key = `place/${rank}`
  try {
    const mesh = await Mesh.listen(LOOPBACK, { rank, token, data: true })
    await meeting.send(key, mesh.place)
    return mesh
  } catch (error) {
    await meeting.send(key, errorMessage(error))
    throw error
  }
}

function placeOf(rank: number, { address, port, nonce }: Fields): PeerAddress {
  // A rank of this machine listens nowhere else: whoever says so is none.
  if (address !== LOOPBACK || !Number.isInteger(port) || typeof nonce !== 'string') throw unreadable(`rank ${rank}`)
  return { rank, address, port: port as number, nonce }
}

function ended({ isAborted, signal }: Meeting, rank: number, cause: unknown): unknown {
  if (isAborted) {
    return new RankwiseError('ABORTED', 'the rendezvous was aborted', { where: 'rendezvous', cause: signal.reason })
  }
  // A rank that knows who is missing has said so.
  if (cause instanceof RankwiseError && cause.code !== 'ABORTED') return cause
  return new RankwiseError('RENDEZVOUS_TIMEOUT', 'the ranks did not get connected in time', {
    where: 'rendezvous',
    actual: { rank },
    rule: 'every rank joins within timeoutMs',
    remedy: 'look for the first error of the other ranks',
    cause,
  })
}
