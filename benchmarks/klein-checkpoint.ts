import { readFile } from 'node:fs/promises'
import { join } from 'node:path'
import { sizeOf } from '@rankwise/core'
import { Flux2Transformer2DModel, writeSyntheticTransformer } from '@rankwise/models-flux2'
import { type Blocks, kleinConfig } from './klein-config.ts'

const BYTES_PER_WEIGHT = 2

/**
 * Makes a bfloat16 checkpoint in `folder`, in one safetensors file; keeps one that is there already.
 *
 * @returns bytes of the weights
 */
export async function makeCheckpoint(folder: string, blocks: Blocks): Promise<number> {
  const config = kleinConfig(blocks)
  const made = await readFile(join(folder, 'config.json'), 'utf8').catch(() => 'null')
  if (JSON.stringify(JSON.parse(made)) !== JSON.stringify(config)) await writeSyntheticTransformer(folder, config)
  const weights = Array.from(Flux2Transformer2DModel.fromConfig(config).namedParameters(), ([, { shape }]) => shape)
  return weights.reduce((bytes, shape) => bytes + BYTES_PER_WEIGHT * sizeOf(shape), 0)
}
