import { RankwiseError } from '@rankwise/core'
import { BindingEngine } from './binding-engine.ts'
import { CapiEngine } from './capi-engine.ts'
import type { Engine, EngineName } from './engine.ts'
import { pinningError, placeThreads } from './pinning.ts'
import { checkEngine } from './self-check.ts'

/** What is asked for. */
export type EngineChoice = EngineName | 'auto'

/** What calls ONNX Runtime, and how it came to that. */
export interface EngineSelection {
  readonly engine: EngineName
  /** Where it computes, as torch names it: `cpu` or `cuda:0`. */
  readonly device: string
  /** What `'auto'` would have preferred, and why it could not be. */
  readonly rejected: readonly { readonly engine: EngineName; readonly reason: string }[]
}

/** What an engine is made from. */
export interface EngineRequest {
  readonly threads: number
  readonly pinThreads: boolean
}

/** An engine, and how it was chosen. */
export interface SelectedEngine {
  readonly engine: Engine
  readonly selection: EngineSelection
}

const CHOICES: readonly EngineChoice[] = ['auto', 'capi', 'binding']

/** The environment variable that stands in for the option `engine` where it is not given. */
export const ENGINE_VARIABLE = 'RANKWISE_ORT_ENGINE'

/** @throws RankwiseError `BACKEND_ENGINE`, `BACKEND_PINNING`; `ORT_ENGINE` when 'capi' is asked for and cannot be used */
export async function selectEngine(choice: string, request: EngineRequest): Promise<SelectedEngine> {
  if (choice === 'capi') return { engine: await openCapi(request), selection: selected('capi') }
  if (choice === 'binding') return { engine: await openBinding(request), selection: selected('binding') }
  if (choice === 'auto') return fastestEngine(request)
  throw new RankwiseError('BACKEND_ENGINE', 'the backend ort has no such engine', {
    actual: { engine: choice },
    rule: `engine, or ${ENGINE_VARIABLE} where it is not given, is one of ${CHOICES.join(', ')}`,
  })
}

async function fastestEngine(request: EngineRequest): Promise<SelectedEngine> {
  try {
    return { engine: await openCapi(request), selection: selected('capi') }
  } catch (error) {
    if (!(error instanceof RankwiseError) || error.code !== 'ORT_ENGINE') throw error
    const rejected = [{ engine: 'capi', reason: error.message }] as const
    return { engine: await openBinding(request), selection: { ...selected('binding'), rejected } }
  }
}

function selected(engine: EngineName): EngineSelection {
  return { engine, device: 'cpu', rejected: [] }
}

async function openCapi({ threads, pinThreads }: EngineRequest): Promise<Engine> {
  const engine = CapiEngine.open({ threads, placement: pinThreads ? placeThreads(threads) : undefined })
  try {
    await checkOnce(engine)
    return engine
  } catch (error) {
    await engine.dispose()
    throw error
  }
}

async function openBinding({ threads, pinThreads }: EngineRequest): Promise<Engine> {
  if (pinThreads) throw pinningError('the engine binding cannot do it', { engine: 'binding' })
  return BindingEngine.open({ threads })
}

let checked = false

/** The library stays the same in a process. */
async function checkOnce(engine: Engine): Promise<void> {
  if (!checked) await checkEngine(engine)
  checked = true
}
