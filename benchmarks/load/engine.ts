import { spawnSync } from 'node:child_process'
import { fileURLToPath } from 'node:url'
import type { RankCommand } from './measure.ts'

/** How a model is split: while it is read, or after all of it has been read. */
export type Mode = 'sharded' | 'full'

/** Something that loads a checkpoint. */
export interface Engine {
  readonly name: 'rankwise' | 'diffusers'
  command(folder: string, mode: Mode): RankCommand
}

export const rankwise: Engine = {
  name: 'rankwise',
  command: (folder, mode) => ({
    file: process.execPath,
    args: ['--import', 'tsx', '--conditions=@rankwise/source', pathOf('rank.ts'), folder, mode],
  }),
}

/** An engine, or why there is none. */
export type Found = { readonly engine: Engine; readonly versions: string } | { readonly missing: string }

const PROBE = `
import accelerate, diffusers, torch, torch.distributed
from diffusers import Flux2Transformer2DModel, TensorParallelConfig
assert torch.distributed.is_gloo_available(), "this torch has no gloo"
print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
`

/** The diffusers of a Python, if it has one with tensor parallelism (0.42 or later). */
export function findDiffusers(python: string): Found {
  const { status, error, stdout, stderr } = spawnSync(python, ['-c', PROBE], {
    encoding: 'utf8',
    env: { ...process.env, ...PEER_ENVIRONMENT },
  })
  if (error !== undefined) return { missing: `${python} does not start: ${error.message}` }
  // The last line of a traceback is the exception.
  if (status !== 0)
    return { missing: `${python} has no diffusers with tensor parallelism: ${stderr.trim().split('\n').at(-1)}` }
  const engine: Engine = {
    name: 'diffusers',
    command: (folder, mode) => ({
      file: python,
      args: [pathOf('diffusers-rank.py'), folder, mode],
      env: PEER_ENVIRONMENT,
    }),
  }
  return { engine, versions: stdout.trim() }
}

/** On the CPU, with one thread as our ranks, and without asking a hub about a folder. */
const PEER_ENVIRONMENT = {
  CUDA_VISIBLE_DEVICES: '',
  GLOO_SOCKET_IFNAME: 'lo',
  HF_HUB_OFFLINE: '1',
  OMP_NUM_THREADS: '1',
}

function pathOf(file: string): string {
  return fileURLToPath(new URL(file, import.meta.url))
}
