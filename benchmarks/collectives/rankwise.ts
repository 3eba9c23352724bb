import '@rankwise/collectives-local'
import { createRequire } from 'node:module'
import { initProcessGroup } from '@rankwise/core'
import { nodeCommand } from '../node-command.ts'
import { rankEnvironment } from '../rank-environment.ts'
import type { Found } from './engine.ts'
import { findMpirun, mpirun } from './mpirun.ts'
import { hasSharedTensors } from './shared-tensors.ts'

const RANK = new URL('rank.ts', import.meta.url)

const local =
  (memory: 'private' | 'arena', transport: 'shm' | 'tcp' = 'shm') =>
  async (ranks: number, plans: readonly string[]) =>
    (await rankEnvironment(ranks)).map((env) => ({
      ...nodeCommand(RANK, ['local', memory, ...plans]),
      env: { ...env, RANKWISE_TRANSPORT: transport },
    }))

/** Tensors anywhere in memory. */
export async function findLocal(): Promise<Found> {
  await using alone = await initProcessGroup({ env: {} })
  const { kernel = 'js' } = alone.collectives as { readonly kernel?: string }
  return { engines: [{ name: 'rankwise local', commands: local('private') }], about: `${kernel} kernel` }
}

/** Ranks that are connected over the loopback, as where they cannot share memory. */
export async function findTcp(): Promise<Found> {
  await using alone = await initProcessGroup({ env: {} })
  const { kernel = 'js' } = alone.collectives as { readonly kernel?: string }
  return { engines: [{ name: 'rankwise tcp', commands: local('private', 'tcp') }], about: `${kernel} kernel, loopback` }
}

/** Tensors in the memory that the ranks share, which are reduced where they are. */
export async function findInArena(): Promise<Found> {
  await using alone = await initProcessGroup({ env: {} })
  if (!hasSharedTensors(alone.collectives))
    return { missing: '@rankwise/collectives-local allocates no shared tensors' }
  return { engines: [{ name: 'rankwise in-arena', commands: local('arena') }], about: 'tensors from `allocate`' }
}

/** Every rank as if it were a machine of its own: they exchange through MPI and not through shared memory. */
export function findMpi(): Found {
  try {
    createRequire(import.meta.url).resolve('@rankwise/collectives-mpi/package.json')
  } catch {
    return { missing: '@rankwise/collectives-mpi is not installed here' }
  }
  const launcher = findMpirun()
  if ('missing' in launcher) return launcher
  const commands = async (ranks: number, plans: readonly string[]) => {
    const environments = await rankEnvironment(ranks)
    const command = nodeCommand(RANK, ['mpi', 'private', ...plans])
    return [
      mpirun(environments.map((env) => ({ ...command, env: { ...env, LOCAL_RANK: '0', LOCAL_WORLD_SIZE: '1' } }))),
    ]
  }
  return { engines: [{ name: 'rankwise mpi', commands }], about: 'each rank a machine of its own, under mpirun' }
}
