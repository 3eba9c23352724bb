import type { Collectives, CollectivesFactory } from './collectives.ts'
import { RankwiseError } from './errors.ts'
import { type Environment, rendezvousFromEnv } from './rendezvous.ts'
import { textOf } from './value-text.ts'

/** Options of `initProcessGroup`. */
export interface ProcessGroupOptions {
  /** Name of the collectives, as their package registered it. @default 'local' */
  readonly backend?: string
  /** Longest wait for peers and for any one operation, in milliseconds. @default RANKWISE_TIMEOUT_MS, or 600000 */
  readonly timeoutMs?: number
  /**
   * Options of the collectives, which refuse those that they do not have: `LocalCollectivesOptions`,
   * `MpiCollectivesOptions` or `NcclCollectivesOptions`. @default {}
   */
  readonly options?: object | undefined
  /** Where rank, world size and address are read from. @default process.env */
  readonly env?: Environment
}

const factories = new Map<string, CollectivesFactory>()
let defaultGroup: ProcessGroup | undefined
let initializing = false

/**
 * Makes collectives available to {@link initProcessGroup} under a name. A collectives package calls it when imported.
 *
 * @throws RankwiseError `COLLECTIVES_NAME_TAKEN` when another factory has the name.
 */
export function registerCollectives(name: string, factory: CollectivesFactory): void {
  const registered = factories.get(name)
  if (registered !== undefined && registered !== factory) {
    throw new RankwiseError('COLLECTIVES_NAME_TAKEN', 'other collectives are already registered under this name', {
      where: name,
      rule: 'one collectives package per name',
      remedy: 'check that the package is installed once, in one version',
    })
  }
  factories.set(name, factory)
}

/** The ranks that run one model together, seen from one of them. */
export class ProcessGroup implements AsyncDisposable {
  readonly rank: number
  readonly worldSize: number
  /** Rank among the processes of this machine. */
  readonly localRank: number
  /** Number of ranks on this machine. */
  readonly localWorldSize: number
  readonly collectives: Collectives

  constructor(collectives: Collectives, localRank: number, localWorldSize: number) {
    this.rank = collectives.rank
    this.worldSize = collectives.worldSize
    this.localRank = localRank
    this.localWorldSize = localWorldSize
    this.collectives = collectives
  }

  /** Leaves the group, frees what it held and clears the default group; idempotent. */
  async destroy(): Promise<void> {
    try {
      await this.collectives.destroy()
    } finally {
      if (defaultGroup === this) defaultGroup = undefined
    }
  }

  /** `destroy`, for `await using`. */
  [Symbol.asyncDispose](): Promise<void> {
    return this.destroy()
  }
}

/**
 * Joins the group that the environment describes and makes it the default group of this process. Resolves once every
 * rank has joined.
 *
 * @throws RankwiseError `COLLECTIVES_NOT_REGISTERED`, `PROCESS_GROUP_EXISTS`, `PROCESS_GROUP_TIMEOUT`, `RENDEZVOUS_ENV`,
 * `COLLECTIVES_OPTIONS` when the collectives do not have an option, and whatever the collectives throw when the ranks do not find each other.
 */
export async function initProcessGroup(options: ProcessGroupOptions = {}): Promise<ProcessGroup> {
  const { backend = 'local', timeoutMs, options: own = {}, env } = options
  const factory = factories.get(backend)
  if (factory === undefined) throw notRegistered(backend)
  if (timeoutMs !== undefined) requireTimeout(timeoutMs)
  if (defaultGroup !== undefined || initializing) throw groupExists()

  const rendezvous = rendezvousFromEnv(env)
  initializing = true
  try {
    const collectives = await factory(timeoutMs === undefined ? rendezvous : { ...rendezvous, timeoutMs }, own)
    defaultGroup = new ProcessGroup(collectives, rendezvous.localRank, rendezvous.localWorldSize)
    return defaultGroup
  } finally {
    initializing = false
  }
}

/** The default group: the one that {@link initProcessGroup} made and that is not yet destroyed. */
export function getProcessGroup(): ProcessGroup | undefined {
  return defaultGroup
}

function requireTimeout(timeoutMs: number): void {
  if (Number.isInteger(timeoutMs) && timeoutMs >= 1 && timeoutMs < 2 ** 31) return
  throw new RankwiseError('PROCESS_GROUP_TIMEOUT', 'timeoutMs is out of range', {
    actual: { timeoutMs },
    rule: 'timeoutMs is an integer from 1 to 2147483647',
  })
}

function notRegistered(backend: string): RankwiseError {
  const registered = [...factories.keys()].map((name) => `'${name}'`)
  return new RankwiseError('COLLECTIVES_NOT_REGISTERED', `no collectives are registered as '${textOf(backend)}'`, {
    actual: { registered: registered.length > 0 ? registered : 'none' },
    rule: 'a collectives package registers its name when it is imported',
    remedy: `import '@rankwise/collectives-${textOf(backend)}' before initProcessGroup`,
  })
}

function groupExists(): RankwiseError {
  return new RankwiseError('PROCESS_GROUP_EXISTS', 'this process already has a default process group', {
    rule: 'one default group at a time',
    remedy: 'destroy the first group (`await using`, or `await group.destroy()`) before the next initProcessGroup',
  })
}
