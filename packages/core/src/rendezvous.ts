import type { Rendezvous } from './collectives.ts'
import { RankwiseError } from './errors.ts'

/** Environment variables, as in `process.env`. */
export type Environment = Readonly<Record<string, string | undefined>>

/** What the environment says about the group, with the secret of the launch. */
export interface EnvironmentRendezvous extends Rendezvous {
  /** `RANKWISE_TOKEN`: a secret that every rank of one launch shares, so that strangers on the port change nothing. */
  readonly token?: string | undefined
}

/** Ten minutes, as torch.distributed waits with NCCL: the slowest rank may still be reading weights. */
export const DEFAULT_TIMEOUT_MS = 600_000

// The longest delay that a timer of Node takes.
const MAX_TIMEOUT_MS = 2 ** 31 - 1

const REQUIRED = ['RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'] as const
const LOCAL = ['LOCAL_RANK', 'LOCAL_WORLD_SIZE'] as const

/**
 * Reads how this process finds its group from the variables that torchrun sets: `RANK`, `WORLD_SIZE`, `MASTER_ADDR`,
 * `MASTER_PORT`, `LOCAL_RANK` and `LOCAL_WORLD_SIZE`, and from `RANKWISE_TIMEOUT_MS` (milliseconds) and
 * `RANKWISE_TOKEN`. With none of torchrun's variables set, the process is rank 0 of 1. The two local variables may be
 * left out together: then all ranks are on this machine.
 *
 * @param env @default process.env
 * @throws RankwiseError `RENDEZVOUS_ENV` when a variable is missing, malformed or contradicts another.
 */
export function rendezvousFromEnv(env: Environment = process.env): EnvironmentRendezvous {
  const timeoutMs = optionalInteger(env, 'RANKWISE_TIMEOUT_MS', 1, MAX_TIMEOUT_MS) ?? DEFAULT_TIMEOUT_MS
  const token = env.RANKWISE_TOKEN
  if ([...REQUIRED, ...LOCAL].every((name) => env[name] === undefined)) return { ...ALONE, timeoutMs, token }

  for (const name of REQUIRED) requireVariable(env, name)
  const worldSize = integer(env, 'WORLD_SIZE', 1, Number.MAX_SAFE_INTEGER)
  const rank = integer(env, 'RANK', 0, worldSize - 1, 'WORLD_SIZE - 1')
  return {
    rank,
    worldSize,
    ...localRanks(env, rank, worldSize),
    masterAddr: address(env, 'MASTER_ADDR'),
    masterPort: integer(env, 'MASTER_PORT', 1, 65_535),
    timeoutMs,
    token,
  }
}

const ALONE = { rank: 0, localRank: 0, worldSize: 1, localWorldSize: 1, masterAddr: '127.0.0.1', masterPort: 0 }

function localRanks(env: Environment, rank: number, worldSize: number) {
  if (LOCAL.every((name) => env[name] === undefined)) return { localRank: rank, localWorldSize: worldSize }
  for (const name of LOCAL) requireVariable(env, name)
  const localWorldSize = integer(env, 'LOCAL_WORLD_SIZE', 1, worldSize, 'WORLD_SIZE')
  const localRank = integer(env, 'LOCAL_RANK', 0, localWorldSize - 1, 'LOCAL_WORLD_SIZE - 1')
  if (localRank > rank) throw invalid('LOCAL_RANK', env.LOCAL_RANK, `LOCAL_RANK is at most RANK (${rank})`)
  return { localRank, localWorldSize }
}

function requireVariable(env: Environment, name: string): void {
  if (env[name] !== undefined) return
  const present = [...REQUIRED, ...LOCAL].filter((other) => env[other] !== undefined)
  throw invalid(name, undefined, `${name} is set when ${present.join(', ')} ${present.length > 1 ? 'are' : 'is'} set`)
}

function optionalInteger(env: Environment, name: string, min: number, max: number): number | undefined {
  return env[name] === undefined ? undefined : integer(env, name, min, max)
}

function integer(env: Environment, name: string, min: number, max: number, maxName?: string): number {
  const text = env[name] ?? ''
  const value = /^\d+$/.test(text) ? Number(text) : Number.NaN
  if (value >= min && value <= max) return value
  const bound = maxName === undefined ? max : `${maxName} (${max})`
  throw invalid(name, text, `${name} is an integer from ${min} to ${bound}`)
}

function address(env: Environment, name: string): string {
  const text = env[name] ?? ''
  if (text === '' || /\s/.test(text)) throw invalid(name, text, `${name} is a host name or an IP address`)
  return text
}

function invalid(name: string, value: string | undefined, rule: string): RankwiseError {
  return new RankwiseError('RENDEZVOUS_ENV', value === undefined ? 'is not set' : 'has no valid value', {
    where: `environment variable ${name}`,
    actual: { [name]: value === undefined ? 'unset' : JSON.stringify(value) },
    rule,
    remedy: 'start the ranks with `rankwise run --nproc-per-node N script`',
  })
}
