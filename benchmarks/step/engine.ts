import { fileURLToPath } from 'node:url'
import { ort } from '@rankwise/backend-ort'
import { tfjs } from '@rankwise/backend-tfjs'
import type { Found } from '../find-engines.ts'
import { nodeCommand } from '../node-command.ts'
import { askPython, PYTHON_ENVIRONMENT } from '../python.ts'
import type { RankCommand } from '../rank-command.ts'
import { type BackendName, type Job, STEP_DTYPES, type StepDType } from './job.ts'

export const ENGINE_NAMES = ['ort-capi', 'ort-binding', 'tfjs-native', 'tfjs-wasm', 'torch'] as const

export type EngineName = (typeof ENGINE_NAMES)[number]

/** Something that runs steps. */
export interface Engine {
  readonly name: EngineName
  readonly backend: BackendName
  /** Of the backend. */
  readonly engine: string
  readonly dtypes: readonly StepDType[]
  /** @default any number */
  readonly mostThreads?: number
  command(job: Job): RankCommand
}

const rankCommand = (job: Job) => nodeCommand(new URL('rank.ts', import.meta.url), [JSON.stringify(job)])

/** One of them, as it is on this machine; torch in `python`. */
export async function findEngine(name: EngineName, python: string): Promise<Found<Engine>> {
  if (name === 'torch') return findTorch(python)
  const engine = { name, dtypes: STEP_DTYPES, command: rankCommand }
  try {
    if (name === 'tfjs-native') {
      await using backend = await tfjs({ engine: 'native', threads: 1 })
      return { engine: { ...engine, backend: 'tfjs', engine: 'native' }, about: `of ${backend.selection.origin}` }
    }
    if (name === 'tfjs-wasm') {
      return { engine: { ...engine, backend: 'tfjs', engine: 'wasm', mostThreads: 1 }, about: 'on one thread' }
    }
    const kind = name === 'ort-capi' ? 'capi' : 'binding'
    await using _backend = await ort({ device: 'cpu', engine: kind, threads: 1 })
    return { engine: { ...engine, backend: 'ort', engine: kind }, about: 'here' }
  } catch (error) {
    return { missing: (error as Error).message }
  }
}

const PROBE = `
import accelerate, diffusers, torch, torch.distributed
from diffusers import Flux2Transformer2DModel, TensorParallelConfig
assert torch.distributed.is_gloo_available(), "this torch has no gloo"
print(f"diffusers {diffusers.__version__}, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
`

const PROGRAM = fileURLToPath(new URL('diffusers-rank.py', import.meta.url))

function findTorch(python: string): Found<Engine> {
  const answer = askPython(python, PROBE, 'diffusers with tensor parallelism')
  if ('missing' in answer) return answer
  const command = (job: Job) => ({
    file: python,
    args: [PROGRAM, JSON.stringify(job)],
    env: { ...PYTHON_ENVIRONMENT, OMP_NUM_THREADS: String(job.threads) },
  })
  const engine: Engine = { name: 'torch', backend: 'diffusers', engine: 'torch', dtypes: STEP_DTYPES, command }
  return { engine, about: answer.output }
}
