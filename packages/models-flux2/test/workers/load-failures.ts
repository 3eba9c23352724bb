import '@rankwise/collectives-local'
import { setTimeout as delay } from 'node:timers/promises'
import {
  type DeviceTensor,
  type FromHubOptions,
  type FromPretrainedOptions,
  initProcessGroup,
  type LoadShardOptions,
  type RankwiseError,
  type ShardSource,
  TensorParallelConfig,
} from '@rankwise/core'
import { ReferenceBackend } from '@rankwise/core/reference'
import { runRank } from '@rankwise/fixtures'
import {
  type Flux2FromPretrainedOptions,
  Flux2KleinPipeline,
  Flux2Transformer2DModel,
  type TextEncoderPlacement,
} from '../../src/index.ts'

/** One load. Lists have an entry for every rank. */
export interface LoadScenario {
  readonly type: 'transformer' | 'pipeline'
  /** Folders, or an id on the hub. */
  readonly places: readonly string[]
  /** Of a pipeline. @default 'replicated' */
  readonly textEncoderPlacement?: TextEncoderPlacement
  /** @default none */
  readonly options?: readonly Pick<Flux2FromPretrainedOptions, 'dtype' | 'lowMemory' | 'textEncoderPlacement'>[]
  readonly hubs?: readonly FromHubOptions[]
  /** @default the size of the group */
  readonly degrees?: readonly number[]
  /** Milliseconds that every weight takes beside its reading. */
  readonly delays: readonly number[]
  /** Milliseconds after which a rank aborts. */
  readonly aborts?: readonly (number | undefined)[]
}

/** How a load ended on one rank. */
export interface LoadEnd {
  readonly code: string
  /** What the error says of the rank that failed, where that was another. */
  readonly elsewhere: Readonly<Record<string, unknown>>
  /** What the error says of options that differ. */
  readonly different: Readonly<Record<string, unknown>>
  readonly milliseconds: number
  /** Bytes that are in memory then. */
  readonly weightBytes: number
}

class SlowBackend extends ReferenceBackend {
  readonly #delay: number

  constructor(milliseconds: number) {
    super()
    this.#delay = milliseconds
  }

  override async loadShard(source: ShardSource, options: LoadShardOptions): Promise<DeviceTensor> {
    // Aborted, it ends early, and reading refuses.
    await delay(this.#delay, undefined, { signal: options.signal }).catch(() => {})
    return super.loadShard(source, options)
  }
}

/** Loads the scenarios one after the other in one group, which outlives every failure. */
runRank(async (scenarios: readonly LoadScenario[]): Promise<readonly LoadEnd[]> => {
  await using group = await initProcessGroup({ backend: 'local' })
  const ends: LoadEnd[] = []
  for (const {
    type,
    places,
    textEncoderPlacement = 'replicated',
    options: given,
    hubs,
    degrees,
    delays,
    aborts,
  } of scenarios) {
    await using backend = new SlowBackend(delays[group.rank] ?? 0)
    const abortAfter = aborts?.[group.rank]
    const signal = abortAfter === undefined ? {} : { signal: AbortSignal.timeout(abortAfter) }
    const parallelConfig = new TensorParallelConfig({ tpDegree: degrees?.[group.rank] ?? group.worldSize })
    const start = performance.now()
    const place = places[group.rank] ?? ''
    const options = {
      backend,
      parallelConfig,
      ...hubs?.[group.rank],
      ...signal,
    }
    const loading: Promise<unknown> =
      type === 'pipeline'
        ? Flux2KleinPipeline.fromPretrained(place, { ...options, textEncoderPlacement, ...given?.[group.rank] })
        : Flux2Transformer2DModel.fromPretrained(place, { ...options, ...given?.[group.rank] } as FromPretrainedOptions)
    const error = await loading.then(
      () => undefined,
      (thrown: RankwiseError) => thrown,
    )
    ends.push({
      code: error === undefined ? 'LOADED' : error.code,
      elsewhere: error?.code === 'LOAD_FAILED_ELSEWHERE' ? error.actual : {},
      different: error?.code === 'LOAD_DIFFERS' ? error.actual : {},
      milliseconds: performance.now() - start,
      weightBytes: backend.memory().weightBytes,
    })
  }
  return ends
})
