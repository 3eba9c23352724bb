import type { LocalGroup } from '@rankwise/collectives-local'
import '@rankwise/collectives-local'
import {
  type Backend,
  chromeTrace,
  gatherProfile,
  initProcessGroup,
  type LoadProgress,
  type LoadReport,
  outcomeOf,
  type ProcessGroup,
  Profiler,
  profileSummary,
  Tensor,
  TensorParallelConfig,
} from '@rankwise/core'
import { Generator, type Image } from '@rankwise/diffusion'
import {
  type AnyFlux2Pipeline,
  type ComponentDTypes,
  DiffusionPipeline,
  type Flux2KleinOptions,
} from '@rankwise/models-flux2'
import { AnonymousMemory } from './anonymous-memory.ts'
import { createBackend } from './backends.ts'
import { writeTrace } from './output-files.ts'
import { createProgress, silentProgress } from './progress.ts'
import type { GenerationSummary, RankWeights } from './summary.ts'

/** What `rankwise generate` was asked for. */
export interface GenerationRequest {
  /** Pipeline folder as diffusers writes it. */
  readonly directory: string
  readonly tpDegree: number
  readonly backend: string
  readonly threads: number | undefined
  /** What the models compute in. */
  readonly dtype: ComponentDTypes
  /** Whether the text encoder is loaded for the prompt alone and freed before the denoising. */
  readonly lowMemory: boolean
  readonly seed: bigint
  readonly out: string
  /** Whether the summary says where the time went. */
  readonly profile: boolean
  /** File that gets a trace of all ranks. */
  readonly trace: string | undefined
  /** Call options of the pipeline that were given or that the demo recommends. */
  readonly call: Flux2KleinOptions<'image'> & { readonly prompt: string }
}

/** Draws on this rank. The summary is that of all ranks; only rank 0 shows progress and saves the picture. */
export async function generate(request: GenerationRequest): Promise<GenerationSummary> {
  const started = performance.now()
  using memory = new AnonymousMemory()
  using profiler = request.profile || request.trace !== undefined ? new Profiler() : undefined
  await using group = await initProcessGroup({ backend: 'local' })
  if (group.rank === 0) reportTransport(group.collectives as LocalGroup)
  await using backend = await createBackend(request.backend, { threads: request.threads })
  const progress = group.rank === 0 ? createProgress() : silentProgress
  try {
    await using pipeline = await loadPipeline(request, backend, (loaded) => progress.load(loaded))
    const loaded = performance.now()
    const generator = new Generator().manualSeed(request.seed)
    const steps = pipeline.steps({ ...request.call, generator })
    let next = await steps.next()
    while (next.done !== true) {
      progress.step(next.value.step + 1, next.value.totalSteps)
      next = await steps.next()
    }
    const drawn = performance.now()
    const image: Image = next.value.images[0]
    // Where that fails, the others hear no error of it: rank 0 fails when they need nothing more of it.
    const saved = await outcomeOf(() => (group.rank === 0 ? image.save(request.out) : undefined))
    profiler?.stop()
    const events = profiler === undefined ? [] : await gatherProfile(profiler.events, group.collectives)
    const transformer = await gatherWeights(group, pipeline.transformer.loadReport, memory.peakBytes)
    if ('error' in saved) throw saved.error
    if (group.rank === 0 && request.trace !== undefined) await writeTrace(request.trace, chromeTrace(events))
    return {
      out: request.out,
      prompt: request.call.prompt,
      seed: String(request.seed),
      height: image.height,
      width: image.width,
      backend: backend.name,
      dtype: pipeline.transformer.dtype,
      ranks: group.worldSize,
      seconds: { load: (loaded - started) / 1000, draw: (drawn - loaded) / 1000 },
      transformer,
      ...(request.profile ? { profile: events.map(profileSummary) } : {}),
    }
  } finally {
    progress.stop()
  }
}

/** Shared memory is what everybody expects; TCP is much slower. */
function reportTransport({ transport, transportReason }: LocalGroup): void {
  if (transport === 'tcp') console.error(`collectives: tcp, as ${transportReason}`)
}

function loadPipeline(
  { directory, tpDegree, dtype, lowMemory }: GenerationRequest,
  backend: Backend,
  onProgress: (progress: LoadProgress) => void,
): Promise<AnyFlux2Pipeline> {
  const parallelConfig = new TensorParallelConfig({ tpDegree })
  return DiffusionPipeline.fromPretrained(directory, { backend, parallelConfig, dtype, lowMemory, onProgress })
}

/** Weight bytes and memory of every rank, known to all of them. */
async function gatherWeights(
  group: ProcessGroup,
  { fullBytes, localBytes, readBytes, mappedBytes }: LoadReport,
  peakAnonBytes = 0,
): Promise<RankWeights> {
  const own = Float64Array.of(localBytes, readBytes, mappedBytes, peakAnonBytes)
  const { data } = await group.collectives.allGather(new Tensor('float64', [1, own.length], own))
  const ranks = Array.from({ length: group.worldSize }, (_, rank) => {
    const [local = 0, read = 0, mapped = 0, peak = 0] = [...data].slice(own.length * rank).map(Number)
    return { rank, localBytes: local, readBytes: read, mappedBytes: mapped, peakAnonBytes: peak === 0 ? null : peak }
  })
  return { fullBytes, ranks }
}
