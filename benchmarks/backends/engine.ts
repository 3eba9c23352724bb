import { fileURLToPath } from 'node:url'
import { ort } from '@rankwise/backend-ort'
import { tfjs } from '@rankwise/backend-tfjs'
import type { Found } from '../find-engines.ts'
import { nodeCommand } from '../node-command.ts'
import { askPython, PYTHON_ENVIRONMENT } from '../python.ts'
import type { RankCommand } from '../rank-command.ts'
import { BLOCK_DTYPES, type BlockDType, type Job } from './job.ts'

export type EngineName = Exclude<Job['backend'], 'reference'>

export const ENGINE_NAMES: readonly EngineName[] = ['ort', 'tfjs-native', 'tfjs-wasm', 'torch']

/** Something that runs a block. */
export interface Engine {
  readonly name: EngineName
  readonly dtypes: readonly BlockDType[]
  /** @default any number */
  readonly mostThreads?: number
  command(job: Job): RankCommand
}

export function rankCommand(job: Job): RankCommand {
  return nodeCommand(new URL('rank.ts', import.meta.url), [JSON.stringify(job)])
}

/** One of them, as it is on this machine; torch in `python`. */
export async function findEngine(name: EngineName, python: string): Promise<Found<Engine>> {
  if (name === 'torch') return findTorch(python)
  if (name === 'tfjs-native') return findNative()
  const engine: Engine = { name, dtypes: ['float32'], command: rankCommand }
  if (name === 'ort') return { engine, about: await aboutOrt() }
  return { engine: { ...engine, mostThreads: 1 }, about: 'float32 alone, on one thread' }
}

async function aboutOrt(): Promise<string> {
  await using backend = await ort({ device: 'cpu', threads: 1 })
  return `float32 alone, engine ${backend.engine}`
}

async function findNative(): Promise<Found<Engine>> {
  try {
    await using backend = await tfjs({ engine: 'native', threads: 1, float32MatmulPrecision: 'medium' })
    const { origin, float32MatmulPrecision, multipliesBfloat16 } = backend.selection
    const dtypes = float32MatmulPrecision === 'medium' ? BLOCK_DTYPES : (['float32'] as const)
    const use = multipliesBfloat16 ? 'multiplied so' : 'cast where it is used'
    return {
      engine: { name: 'tfjs-native', dtypes, command: rankCommand },
      about: `of ${origin}, ${dtypes.join(' and ')}${dtypes.length > 1 ? ` (${use})` : ''}`,
    }
  } catch (error) {
    return { missing: (error as Error).message }
  }
}

const PROBE = `
import diffusers, torch
from diffusers.models.transformers.transformer_flux2 import Flux2SingleTransformerBlock
print(f"diffusers {diffusers.__version__}, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
`

const PROGRAM = fileURLToPath(new URL('torch-rank.py', import.meta.url))

function findTorch(python: string): Found<Engine> {
  const answer = askPython(python, PROBE, 'diffusers with FLUX.2')
  if ('missing' in answer) return answer
  const command = (job: Job) => ({
    file: python,
    args: [PROGRAM, JSON.stringify(job)],
    env: { ...PYTHON_ENVIRONMENT, OMP_NUM_THREADS: String(job.threads) },
  })
  return { engine: { name: 'torch', dtypes: BLOCK_DTYPES, command }, about: answer.output }
}
