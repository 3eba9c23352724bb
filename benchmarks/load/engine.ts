import { fileURLToPath } from 'node:url'
import { nodeCommand } from '../node-command.ts'
import { askPython, PYTHON_ENVIRONMENT } from '../python.ts'
import type { RankCommand } from '../rank-command.ts'

/** How a model is split: while it is read, or after all of it has been read. */
export type Mode = 'sharded' | 'full'

/** Something that loads a checkpoint. */
export interface Engine {
  readonly name: 'rankwise' | 'diffusers'
  command(folder: string, mode: Mode): RankCommand
}

export const rankwise: Engine = {
  name: 'rankwise',
  command: (folder, mode) => nodeCommand(new URL('rank.ts', import.meta.url), [folder, mode]),
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
  const answer = askPython(python, PROBE, 'diffusers with tensor parallelism')
  if ('missing' in answer) return answer
  const program = fileURLToPath(new URL('diffusers-rank.py', import.meta.url))
  const engine: Engine = {
    name: 'diffusers',
    command: (folder, mode) => ({ file: python, args: [program, folder, mode], env: PYTHON_ENVIRONMENT }),
  }
  return { engine, versions: answer.output }
}
