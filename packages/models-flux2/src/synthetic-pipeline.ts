import { cp, mkdir, statfs, writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import { RankwiseError, type SaveProgress, sizeOf } from '@rankwise/core'
import { AutoencoderKLFlux2, Mistral3ForConditionalGeneration, Qwen3ForCausalLM } from '@rankwise/diffusion'
import type { Flux2Preset } from './presets.ts'
import { type SyntheticModel, writeSyntheticModel } from './synthetic-model.ts'
import { SyntheticWeights } from './synthetic-weights.ts'
import { Flux2Transformer2DModel } from './transformer.ts'

/** Options of `writeSyntheticPipeline`. */
export interface SyntheticPipelineOptions {
  /** Folder of a tokenizer, which is copied: prompts have to become tokens, if not those of the real model. */
  readonly tokenizer: string
  /** Aborts with `ABORTED`; the folder is then without a `model_index.json`. */
  readonly signal?: AbortSignal
  /** Called after every 16 MiB. */
  readonly onProgress?: (progress: SaveProgress) => void
}

interface Part extends SyntheticModel {
  readonly folder: string
}

const BYTES_PER_WEIGHT = 2

const SCHEDULER = {
  _class_name: 'FlowMatchEulerDiscreteScheduler',
  num_train_timesteps: 1000,
  shift: 3,
  use_dynamic_shifting: true,
}

/**
 * Writes a pipeline of real size with random weights in bfloat16, in the layout of diffusers: what it draws is noise, but
 * it takes the memory and the time of the real one. Layers of the text encoder that no prompt needs are left out.
 *
 * @param directory - made when there is none; `model_index.json` is written last
 * @throws RankwiseError `DISK_SPACE` before anything is written, `SAVE_*`, `ABORTED`
 */
export async function writeSyntheticPipeline(
  directory: string,
  preset: Flux2Preset,
  { tokenizer, signal, onProgress }: SyntheticPipelineOptions,
): Promise<void> {
  const parts = partsOf(preset)
  await mkdir(directory, { recursive: true })
  await requireSpace(directory, parts)
  const weights = new SyntheticWeights()
  for (const { folder, ...model } of parts) {
    await writeSyntheticModel(join(directory, folder), model, { component: folder, weights, signal, onProgress })
  }
  await cp(tokenizer, join(directory, 'tokenizer'), { recursive: true })
  await writeJson(join(directory, 'scheduler'), 'scheduler_config.json', SCHEDULER)
  const index = { _class_name: preset.className, is_distilled: preset.isDistilled }
  await writeJson(directory, 'model_index.json', index)
}

function partsOf({ className, transformer, textEncoder }: Flux2Preset): readonly Part[] {
  const TextEncoder = className === 'Flux2Pipeline' ? Mistral3ForConditionalGeneration : Qwen3ForCausalLM
  const vae = { _class_name: 'AutoencoderKLFlux2' }
  return [
    {
      folder: 'transformer',
      weightsName: 'diffusion_pytorch_model',
      config: transformer,
      model: Flux2Transformer2DModel.fromConfig(transformer),
    },
    { folder: 'text_encoder', weightsName: 'model', config: textEncoder, model: TextEncoder.fromConfig(textEncoder) },
    { folder: 'vae', weightsName: 'diffusion_pytorch_model', config: vae, model: AutoencoderKLFlux2.fromConfig(vae) },
  ]
}

async function requireSpace(directory: string, parts: readonly Part[]): Promise<void> {
  const weights = parts.flatMap(({ model }) => Array.from(model.namedParameters(), ([, { shape }]) => sizeOf(shape)))
  const bytes = BYTES_PER_WEIGHT * weights.reduce((sum, size) => sum + size, 0)
  const { bavail, bsize } = await statfs(directory)
  if (bytes <= bavail * bsize) return
  throw new RankwiseError('DISK_SPACE', 'there is not enough room on the disk', {
    where: directory,
    actual: { bytes, available: bavail * bsize },
    rule: 'the weights fit',
  })
}

async function writeJson(directory: string, name: string, value: unknown): Promise<void> {
  await mkdir(directory, { recursive: true })
  await writeFile(join(directory, name), `${JSON.stringify(value, undefined, 2)}\n`)
}
