import type { ModelConformanceOptions, ModelGolden } from '@rankwise/conformance'
import { bfloat16Spread, loadGolden, onRanks, referencePath } from '@rankwise/fixtures'
import { Flux2Transformer2DModel } from '../src/index.ts'
import type { TappedRun, Taps } from './workers/tapped-transformer.ts'

const WORKER = new URL('workers/tapped-transformer.ts', import.meta.url)
const BLOCKS = ['double0.0', 'double0.1', 'double1.0', 'double1.1', 'single0', 'single1', 'single2'].map(
  (b) => `mid.${b}`,
)

function outputsOf(golden: string, compared: readonly string[]): ModelGolden['outputs'] {
  return async () => {
    const tensors = await loadGolden(golden)
    return Object.fromEntries(compared.map((output) => [output, tensors.get(output)]))
  }
}

// The goldens of klein have no blocks; those of dev have all.
const GOLDENS = [
  { checkpoint: 'flux2-klein-tiny', name: 'flux2-klein-tiny.a', compared: ['mid.temb', 'out'] },
  { checkpoint: 'flux2-klein-tiny', name: 'flux2-klein-tiny.b', compared: ['mid.temb', 'out'] },
  { checkpoint: 'flux2-tiny', name: 'flux2-tiny.a', compared: ['mid.temb', ...BLOCKS, 'out'] },
  { checkpoint: 'flux2-tiny', name: 'flux2-tiny.b', compared: ['mid.temb', ...BLOCKS, 'out'] },
  { checkpoint: 'flux2-tiny-bf16', name: 'flux2-tiny-bf16.a', compared: ['out'] },
].map(({ checkpoint, name, compared }): ModelGolden & TappedRun => {
  const golden = `transformer/${name}.f32.safetensors`
  return { checkpoint, name, golden, outputs: outputsOf(golden, compared) }
})

const BFLOAT16 = 'transformer/flux2-tiny-bf16.a.bf16.safetensors'

GOLDENS.push({
  checkpoint: 'flux2-tiny-bf16',
  name: 'flux2-tiny-bf16.a in bfloat16',
  golden: BFLOAT16,
  dtype: 'bfloat16',
  outputs: outputsOf(BFLOAT16, ['out']),
  tolerance: await bfloat16Spread('transformer'),
})

/** What the model has to conform to. */
export const CONFORMANCE: ModelConformanceOptions = {
  model: Flux2Transformer2DModel,
  checkpoints: ['flux2-tiny', 'flux2-klein-tiny', 'flux2-tiny-bf16'].map((name) => ({
    name,
    directory: referencePath(name, 'transformer'),
    shards: referencePath('goldens', 'tp', `${name}.shards.json`),
  })),
  goldens: GOLDENS,
  run: async (worldSize) => {
    const runs = GOLDENS.map(({ checkpoint, golden, dtype }): TappedRun => ({ checkpoint, golden, dtype }))
    return (await onRanks<readonly Taps[]>(worldSize, WORKER, runs)) as readonly (readonly Record<
      string,
      Float32Array
    >[])[]
  },
}
