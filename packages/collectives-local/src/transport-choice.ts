import { RankwiseError, textOf } from '@rankwise/core'
import type { Native } from './native.ts'
import { loadNative } from './native.ts'
import { SharedMemory } from './shared-memory.ts'
import type { TransportChoice } from './transport.ts'

/** Why a rank cannot share memory. */
export interface Obstacle {
  readonly code: string
  readonly what: string
}

/** What a rank can do, and what it was asked to. */
export interface Ability {
  readonly choice: TransportChoice
  /** Undefined when the rank can share memory, as far as it can find out alone, or was not asked to. */
  readonly obstacle: Obstacle | undefined
}

/** Bytes of the memory that is tried: one page. */
const TRIAL_BYTES = 4096

/**
 * What this rank can do.
 *
 * @returns with `native`, where memory can be shared
 * @throws RankwiseError `TRANSPORT_UNKNOWN`
 */
export async function findAbility(choice: TransportChoice): Promise<{ ability: Ability; native: Native | undefined }> {
  requireKnown(choice)
  if (choice === 'tcp') return { ability: { choice, obstacle: undefined }, native: undefined }
  try {
    const native = await loadNative()
    tryMemory(native)
    return { ability: { choice, obstacle: undefined }, native }
  } catch (error) {
    return { ability: { choice, obstacle: obstacleOf(error) }, native: undefined }
  }
}

/** The obstacle that an error stands for; what is no error of ours is none. @throws any other error */
export function obstacleOf(error: unknown): Obstacle {
  if (!(error instanceof RankwiseError)) throw error
  const { code, message, actual } = error
  const [line = ''] = message.split('\n')
  const details = Object.entries(actual ?? {}).map(([name, value]) => `${name} ${textOf(value)}`)
  const what = line.replace(`[${code}] `, '')
  return { code, what: details.length > 0 ? `${what} (${details.join(', ')})` : what }
}

/** What all ranks together ask for. @param abilities in rank order. @throws RankwiseError `RENDEZVOUS_REFUSED` */
export function commonChoice(abilities: readonly Ability[]): TransportChoice {
  const choices = new Set(abilities.map(({ choice }) => choice).filter((choice) => choice !== 'auto'))
  if (choices.size > 1) {
    throw new RankwiseError('RENDEZVOUS_REFUSED', 'the ranks ask for different transports', {
      where: 'rendezvous',
      actual: { transport: abilities.map(({ choice }) => choice) },
      rule: "ranks that name a transport name the same; 'auto' goes with each",
    })
  }
  return [...choices][0] ?? 'auto'
}

/** The first rank that cannot share memory, in words. @param abilities in rank order */
export function firstObstacle(abilities: readonly Ability[]): Obstacle | undefined {
  const rank = abilities.findIndex(({ obstacle }) => obstacle !== undefined)
  const obstacle = abilities[rank]?.obstacle
  return obstacle && { ...obstacle, what: `rank ${rank} cannot share memory: ${obstacle.what}` }
}

/** An obstacle where nothing but shared memory will do. */
export function obstacleError({ code, what }: Obstacle): RankwiseError {
  return new RankwiseError(code, what, {
    where: 'rendezvous',
    rule: "transport 'shm' needs Linux, and all ranks as one user in one pid namespace",
    remedy: "remove what is in the way, or choose transport 'tcp' or 'auto'",
  })
}

/** Creates, maps and frees memory as a group would, and looks whether ranks may sleep on it. */
function tryMemory(native: Native): void {
  const memory = SharedMemory.create(native, TRIAL_BYTES)
  try {
    native.requireSleep(memory.address)
  } finally {
    memory.unmap()
  }
}

function requireKnown(choice: TransportChoice): void {
  if (['auto', 'shm', 'tcp'].includes(choice)) return
  throw new RankwiseError('TRANSPORT_UNKNOWN', 'there is no such transport', {
    actual: { transport: choice },
    rule: "transport, or RANKWISE_TRANSPORT, is 'auto', 'shm' or 'tcp'",
  })
}
