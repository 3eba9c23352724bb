import { createHash } from 'node:crypto'
import { setTimeout as delay } from 'node:timers/promises'
import { RankwiseError } from '../errors.ts'
import type { EnvironmentRendezvous } from '../rendezvous.ts'
import type { Store, StoreWaitOptions } from '../store.ts'
import { ClientConnection } from './client-connection.ts'
import { ConnectionError } from './connection-error.ts'
import type { Secret } from './handshake.ts'
import { HostedStore } from './hosted-store.ts'
import { PrefixStore } from './prefix-store.ts'
import { waitFor } from './store-wait.ts'
import { TcpStore } from './tcp-store.ts'
import { TcpStoreServer } from './tcp-store-server.ts'

/** How long rank 0 tries for its port: a connection attempt of another rank may hold it for a moment. */
const BIND_MS = 2_000
const BIND_RETRY_MS = 50

const FIRST_RETRY_MS = 10
const MAX_RETRY_MS = 200

/**
 * Runs of stores that this process has left. Rank 0 may still hold the last one when another rank already looks for the
 * next one at the same address.
 */
const leftSessions = new Set<string>()

/** How often this process has opened the store of an agent, by its place there: each group gets keys of its own. */
const agentGroups = new Map<string, number>()

/**
 * Opens the store where the ranks of a group meet. Under torchrun it is that of its agent; otherwise rank 0 holds it, at
 * exactly `masterAddr:masterPort`, and the others look for it until `timeoutMs` is over. Every group of a process opens
 * a store of its own, in the same order on all ranks.
 *
 * With a token, rank 0 and the others prove to each other that they know it. The store of an agent has no such proof,
 * neither for torch's ranks nor for these: whoever reaches its port can read and write it.
 *
 * @throws RankwiseError `RENDEZVOUS_ADDRESS` when rank 0 cannot listen, `RENDEZVOUS_TIMEOUT`, `ABORTED`
 */
export async function openStore(rendezvous: EnvironmentRendezvous, options: StoreWaitOptions = {}): Promise<Store> {
  const { rank, worldSize, timeoutMs, agentRunId } = rendezvous
  if (agentRunId !== undefined) return openAgentStore(rendezvous, agentRunId, options)
  if (worldSize === 1) return new HostedStore(undefined, timeoutMs)
  if (rank === 0) return new HostedStore(await listen(rendezvous, options), timeoutMs)
  return joinStore(rendezvous, options)
}

async function openAgentStore(
  rendezvous: EnvironmentRendezvous,
  runId: string,
  options: StoreWaitOptions,
): Promise<Store> {
  const place = `rankwise/${runId}/${rendezvous.restartCount ?? 0}/${scopeOf(rendezvous)}`
  const where = addressOf(rendezvous)
  const group = agentGroups.get(`${where} ${place}`) ?? 0
  agentGroups.set(`${where} ${place}`, group + 1)

  const { masterAddr: host, masterPort: port } = rendezvous
  const connect = (signal: AbortSignal) => ClientConnection.open({ host, port, signal })
  const first = await findStore(rendezvous, connect, "torchrun's agent", options)
  const holder = { name: "torchrun's agent", ranks: [] }
  return new PrefixStore(`${place}/${group}`, new TcpStore(first, { connect, timeoutMs: rendezvous.timeoutMs, holder }))
}

/** Keeps launches with different tokens, or of different sizes, apart in one store. */
function scopeOf({ token = '', worldSize }: EnvironmentRendezvous): string {
  return createHash('sha256').update(`rankwise scope ${worldSize} ${token}`).digest('hex').slice(0, 32)
}

async function listen(rendezvous: EnvironmentRendezvous, { signal }: StoreWaitOptions): Promise<TcpStoreServer> {
  const end = performance.now() + BIND_MS
  for (;;) {
    try {
      return await listenAtOnePort(rendezvous)
    } catch (cause) {
      const isTaken = (cause as NodeJS.ErrnoException).code === 'EADDRINUSE'
      if (!isTaken || performance.now() > end) throw addressUnusable(addressOf(rendezvous), cause)
      await waitFor(delay(BIND_RETRY_MS), { where: addressOf(rendezvous), timeoutMs: BIND_MS, signal, stop: () => {} })
    }
  }
}

/** @throws the error of the last port */
async function listenAtOnePort(rendezvous: EnvironmentRendezvous): Promise<TcpStoreServer> {
  let error: unknown
  for (const port of portsOf(rendezvous)) {
    try {
      return await TcpStoreServer.listen(rendezvous.masterAddr, port, { secret: secretOf(rendezvous) })
    } catch (cause) {
      error = cause
    }
  }
  throw error
}

async function joinStore(rendezvous: EnvironmentRendezvous, options: StoreWaitOptions): Promise<Store> {
  const connectToAny = (signal: AbortSignal) => connectFirst(rendezvous, signal)
  const { connection: first, port } = await findStore(rendezvous, connectToAny, 'rank 0', options)
  const connect = async (signal: AbortSignal) => {
    const connection = await connectTo(rendezvous, port, signal)
    if (connection.session === first.session) return connection
    connection.close()
    throw new ConnectionError('the store was replaced by another one')
  }
  const holder = { name: 'rank 0', ranks: [0] }
  return new JoinedStore(first, { connect, timeoutMs: rendezvous.timeoutMs, holder })
}

/** Rank 0's store; once left, it is not taken for the next one. */
class JoinedStore extends TcpStore {
  readonly #session: string

  constructor(first: ClientConnection, options: ConstructorParameters<typeof TcpStore>[1]) {
    super(first, options)
    this.#session = first.session
  }

  override close(): Promise<void> {
    leftSessions.add(this.#session)
    return super.close()
  }
}

/** Connects to the port where rank 0 is, of those that it may have taken. */
async function connectFirst(rendezvous: EnvironmentRendezvous, signal: AbortSignal) {
  const others = new AbortController()
  const abort = () => others.abort()
  signal.addEventListener('abort', abort)
  const attempts = portsOf(rendezvous).map(async (port) => {
    const connection = await connectTo(rendezvous, port, others.signal)
    if (!leftSessions.has(connection.session)) return { connection, port }
    connection.close()
    throw new ConnectionError('the store is that of the last group')
  })
  try {
    return await Promise.any(attempts)
  } catch (error) {
    throw new ConnectionError((error as AggregateError).errors.map(({ message }) => message).join('; '))
  } finally {
    signal.removeEventListener('abort', abort)
    others.abort()
  }
}

function connectTo(rendezvous: EnvironmentRendezvous, port: number, signal: AbortSignal): Promise<ClientConnection> {
  return ClientConnection.open({ host: rendezvous.masterAddr, port, secret: secretOf(rendezvous), signal })
}

/** Tries to connect until the time is over. */
async function findStore<T>(
  rendezvous: EnvironmentRendezvous,
  connect: (signal: AbortSignal) => Promise<T>,
  holder: string,
  { signal }: StoreWaitOptions,
): Promise<T> {
  const stop = new AbortController()
  let lastError: unknown
  const attempts = async (): Promise<T> => {
    for (let pause = FIRST_RETRY_MS; ; pause = Math.min(pause * 2, MAX_RETRY_MS)) {
      try {
        return await connect(stop.signal)
      } catch (error) {
        lastError = error
      }
      await delay(pause, undefined, { signal: stop.signal })
    }
  }
  const where = addressOf(rendezvous)
  try {
    return await waitFor(attempts(), { where, timeoutMs: rendezvous.timeoutMs, signal, stop: () => stop.abort() })
  } catch (error) {
    const isTimeout = error instanceof RankwiseError && error.code === 'RENDEZVOUS_TIMEOUT'
    throw isTimeout ? notFound(rendezvous, holder, lastError) : error
  }
}

function secretOf({ token = '', jobId = '', restartCount = 0 }: EnvironmentRendezvous): Secret {
  return { token, scope: `${jobId} ${restartCount}` }
}

function portsOf({ masterPort, portCount = 1 }: EnvironmentRendezvous): number[] {
  return Array.from({ length: portCount }, (_, i) => masterPort + i)
}

function addressOf({ masterAddr, masterPort, portCount = 1 }: EnvironmentRendezvous): string {
  return `${masterAddr}:${masterPort}${portCount > 1 ? `-${masterPort + portCount - 1}` : ''}`
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

function notFound(rendezvous: EnvironmentRendezvous, holder: string, cause: unknown): RankwiseError {
  const { rank, timeoutMs } = rendezvous
  return new RankwiseError('RENDEZVOUS_TIMEOUT', `${holder} was not found in time`, {
    where: addressOf(rendezvous),
    actual: { rank, timeoutMs, last: cause instanceof Error ? cause.message : String(cause) },
    rule: 'every rank joins within timeoutMs',
    remedy: 'check that rank 0 was started, with the same MASTER_ADDR, MASTER_PORT and RANKWISE_TOKEN',
    cause,
  })
}
