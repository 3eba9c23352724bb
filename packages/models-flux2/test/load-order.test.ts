import { cp, mkdtemp, readdir, rm, stat, truncate } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { setTimeout as delay } from 'node:timers/promises'
import type { Backend, DeviceTensor, LoadProgress, LoadShardOptions, ShardSource } from '@rankwise/core'
import { ReferenceBackend } from '@rankwise/core/reference'
import { referencePath } from '@rankwise/fixtures'
import { describe, expect, it, onTestFinished } from 'vitest'
import { type Flux2FromPretrainedOptions, Flux2KleinPipeline } from '../src/index.ts'

const PIPELINE = referencePath('flux2-klein-tiny')
const COMPONENTS = ['text_encoder', 'transformer', 'vae']

/** Takes its time for every weight. */
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

/** Compares a model with what is loaded already. */
class WeighingBackend extends SlowBackend {
  requireRoom(): void {}
}

/** Reports of progress that a load gives. */
async function progressOf(backend: Backend, options: Partial<Flux2FromPretrainedOptions> = {}) {
  const progress: LoadProgress[] = []
  await using pipeline = await Flux2KleinPipeline.fromPretrained(PIPELINE, {
    backend,
    onProgress: (report) => progress.push(report),
    ...options,
  })
  expect(pipeline.transformer.dtype).toBe('float32')
  return progress
}

/** Where the reports of a component begin and end among all. */
function spanOf(progress: readonly LoadProgress[], component: string): readonly [first: number, last: number] {
  const names = progress.map((report) => report.component)
  return [names.indexOf(component), names.lastIndexOf(component)]
}

/** Pairs of components that were loading at the same time. */
function overlaps(progress: readonly LoadProgress[]): readonly string[] {
  const loaded = COMPONENTS.filter((component) => spanOf(progress, component)[0] >= 0)
  return loaded.flatMap((a, i) =>
    loaded.slice(i + 1).flatMap((b) => {
      const [[firstA, lastA], [firstB, lastB]] = [spanOf(progress, a), spanOf(progress, b)]
      return firstA < lastB && firstB < lastA ? [`${a}, ${b}`] : []
    }),
  )
}

describe('the models of a pipeline', () => {
  it('load at the same time, each with progress of its own', async () => {
    await using backend = new SlowBackend(1)
    const progress = await progressOf(backend)
    expect(overlaps(progress)).toHaveLength(3)
    for (const component of COMPONENTS) {
      const reports = progress.filter((report) => report.component === component)
      const [last] = reports.slice(-1)
      expect(new Set(reports.map(({ totalBytes }) => totalBytes)).size, component).toBe(1)
      expect(last?.loadedBytes, component).toBe(last?.totalBytes)
      expect(reports.every(({ loadedBytes }, i) => i === 0 || loadedBytes > (reports[i - 1]?.loadedBytes ?? 0))).toBe(
        true,
      )
    }
  })

  it('load one after the other with lowMemory, and where a backend compares each with those before', async () => {
    await using backend = new SlowBackend(1)
    const low = await progressOf(backend, { lowMemory: true })
    expect([...new Set(low.map(({ component }) => component))]).toEqual(['transformer', 'vae'])
    expect(overlaps(low)).toEqual([])
    await using weighing = new WeighingBackend(1)
    const weighed = await progressOf(weighing)
    expect([...new Set(weighed.map(({ component }) => component))].sort()).toEqual(COMPONENTS)
    expect(overlaps(weighed)).toEqual([])
  })

  it.each(COMPONENTS)('are all freed when the weights of the %s are cut off', async (component) => {
    const directory = await mkdtemp(join(tmpdir(), 'rankwise-'))
    onTestFinished(() => rm(directory, { recursive: true, force: true }))
    await cp(PIPELINE, directory, { recursive: true })
    const folder = join(directory, component)
    const weights = (await readdir(folder)).filter((name) => name.endsWith('.safetensors')).sort()
    const file = join(folder, weights.at(-1) ?? '')
    await truncate(file, (await stat(file)).size - 1)
    // A load of all weights would take minutes.
    await using backend = new SlowBackend(2000)
    const start = performance.now()
    await expect(Flux2KleinPipeline.fromPretrained(directory, { backend })).rejects.toMatchObject({
      code: 'SAFETENSORS_TRUNCATED',
    })
    expect(performance.now() - start).toBeLessThan(20_000)
    expect(backend.memory().weightBytes).toBe(0)
  })

  it('are all freed when the load is aborted', async () => {
    await using backend = new SlowBackend(2000)
    const stop = new AbortController()
    const loading = Flux2KleinPipeline.fromPretrained(PIPELINE, { backend, signal: stop.signal })
    setTimeout(() => stop.abort(new Error('enough')), 100)
    await expect(loading).rejects.toMatchObject({ code: 'ABORTED' })
    expect(backend.memory().weightBytes).toBe(0)
  })
})
