import '@rankwise/collectives-local'
import { createHash } from 'node:crypto'
import { closeSync, openSync, readdirSync, readFileSync, readlinkSync } from 'node:fs'
import { setTimeout as delay } from 'node:timers/promises'
import { setFlagsFromString } from 'node:v8'
import { runInNewContext } from 'node:vm'
import { ort } from '@rankwise/backend-ort'
import { type Backend, initProcessGroup, type ProcessGroup, TensorParallelConfig } from '@rankwise/core'
import { callOptions, directory } from '@rankwise/demo-flux2'
import { Generator } from '@rankwise/diffusion'
import { runRank } from '@rankwise/fixtures'
import { type AnyFlux2Pipeline, Flux2KleinPipeline } from '../../src/index.ts'

/** How a prompt ends. */
export type Ending =
  | { readonly kind: 'drawn' }
  /** All ranks leave the loop over the steps after that many, and their group goes on. */
  | { readonly kind: 'left'; readonly steps: number }
  /** These ranks abort after a part of the time that the last picture took, and all make a new group. */
  | { readonly kind: 'aborted'; readonly ranks: readonly number[]; readonly moment: number }

export interface SoakPrompt {
  readonly prompt: string
  readonly ending: Ending
}

export interface Soak {
  readonly prompts: readonly SoakPrompt[]
  /** Keep 1 MB and a descriptor of every prompt. */
  readonly leaks: boolean
}

/** What a process has. */
export interface Held {
  /** Bytes of anonymous memory. */
  readonly anonymous: number
  /** What each is of, without its numbers. */
  readonly descriptors: readonly string[]
  /** Mappings of memory that the ranks share. */
  readonly mappings: number
}

/** What a rank made of a prompt, and what it had when it was ready for the next. */
export interface SoakStep {
  /** Hash of the picture, or the code of the error; 'left' for a loop that was left. */
  readonly end: { readonly picture: string } | { readonly code: string }
  readonly held: Held
}

export interface SoakResult {
  readonly steps: readonly SoakStep[]
  readonly before: Held
  readonly after: Held
}

/** Few, for speed: their number changes nothing of what is held. */
const STEPS = 4

setFlagsFromString('--expose-gc')
const collectGarbage = runInNewContext('gc') as () => void

async function held(): Promise<Held> {
  // Twice, with a turn of the event loop: what finalizers free is counted as well.
  for (let i = 0; i < 2; i++) {
    collectGarbage()
    await delay(1)
  }
  const kilobytes = /^RssAnon:\s+(\d+) kB/m.exec(readFileSync('/proc/self/status', 'latin1'))?.[1]
  const targets = readdirSync('/proc/self/fd').flatMap((descriptor) => {
    try {
      return [readlinkSync(`/proc/self/fd/${descriptor}`)]
    } catch {
      return [] // the one that lists the directory
    }
  })
  const mappings = readFileSync('/proc/self/maps', 'utf8').split('\n')
  return {
    anonymous: 1024 * Number(kilobytes),
    descriptors: targets
      // tsx, which runs these sources, writes its cache whenever it finds the time.
      .filter((target) => !/\/tsx-\d+\//.test(target))
      .map((target) => target.replaceAll(/\d+/g, 'N'))
      .sort(),
    mappings: mappings.filter((line) => line.includes('memfd:rankwise')).length,
  }
}

interface Joined extends AsyncDisposable {
  readonly group: ProcessGroup
  readonly pipeline: AnyFlux2Pipeline
}

/** A group, and a pipeline that is split over it. */
async function join(backend: Backend): Promise<Joined> {
  const group = await initProcessGroup({ backend: 'local' })
  const parallelConfig = new TensorParallelConfig({ tpDegree: group.worldSize })
  const pipeline = await Flux2KleinPipeline.fromPretrained(directory, { backend, parallelConfig })
  const leave = async () => {
    await pipeline.dispose()
    await group.destroy()
  }
  return { group, pipeline, [Symbol.asyncDispose]: leave }
}

/** Of the last picture that was drawn to the end. */
let lastMs = 0

async function draw({ group, pipeline }: Joined, { prompt, ending }: SoakPrompt): Promise<SoakStep['end']> {
  const started = performance.now()
  using stop = stopAfter(ending, group.rank)
  const generator = new Generator().manualSeed(42)
  const options = { ...callOptions, prompt, numInferenceSteps: STEPS, generator, signal: stop.signal }
  const steps = pipeline.steps<'image'>(options)
  try {
    let next = await steps.next()
    while (next.done !== true) {
      if (ending.kind === 'left' && next.value.step + 1 === ending.steps) {
        await steps.return(undefined as never)
        return { code: 'left' }
      }
      next = await steps.next()
    }
    lastMs = performance.now() - started
    return { picture: createHash('sha256').update(next.value.images[0].data).digest('hex') }
  } catch (error) {
    return { code: (error as { code?: string }).code ?? String(error) }
  }
}

function stopAfter(ending: Ending, rank: number): Disposable & { readonly signal: AbortSignal } {
  const stop = new AbortController()
  const isAborted = ending.kind === 'aborted' && ending.ranks.includes(rank)
  const timer = isAborted ? setTimeout(() => stop.abort(), ending.moment * lastMs) : undefined
  return { signal: stop.signal, [Symbol.dispose]: () => clearTimeout(timer) }
}

/** Draws one prompt after the other in one process. */
runRank(async ({ prompts, leaks }: Soak): Promise<SoakResult> => {
  const kept: { readonly bytes: Buffer; readonly descriptor: number }[] = []
  const before = await held()
  const steps: SoakStep[] = []
  {
    await using backend = await ort({ device: 'cpu', threads: 1 })
    let joined = await join(backend)
    try {
      for (const soak of prompts) {
        const end = await draw(joined, soak)
        if (soak.ending.kind === 'aborted') {
          await joined[Symbol.asyncDispose]()
          joined = await join(backend)
        }
        if (leaks) kept.push({ bytes: Buffer.alloc(1e6, 1), descriptor: openSync('/dev/null', 'r') })
        steps.push({ end, held: await held() })
      }
    } finally {
      await joined[Symbol.asyncDispose]()
    }
  }
  for (const { descriptor } of kept) closeSync(descriptor)
  return { steps, before, after: await held() }
})
