import { existsSync } from 'node:fs'
import { mkdir, readFile, writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import { Tensor, writeSafetensors } from '@rankwise/core'
import { Flux2Transformer2DModel, rotaryTables } from '@rankwise/models-flux2'
import type { Flux2Config } from '../klein-config.ts'
import { inputTypes, textTokensOf } from './block-graph.ts'
import type { BlockCase, BlockKind } from './job.ts'
import { randomTensor } from './random.ts'

const PREFIXES: Readonly<Record<BlockKind, string>> = {
  single: 'single_transformer_blocks.0.',
  double: 'transformer_blocks.0.',
}

/** Of an image, as many tokens lie beside each other. */
const IMAGE_WIDTH = 32

/** The weights of a block, without `.safetensors`. */
export function weightsName({ block }: Pick<BlockCase, 'block'>): string {
  return block
}

export function inputsFile(folder: string, { block, tokens }: BlockCase): string {
  return join(folder, `${block}-${tokens}.inputs.safetensors`)
}

/** What float64 makes of them. */
export function expectedFile(folder: string, { block, tokens, tp }: BlockCase): string {
  return join(folder, `${block}-${tokens}-tp${tp}.expected.safetensors`)
}

/**
 * Writes what a case is run with, all of it made from names: `config.json`, weights in bfloat16, inputs. Keeps what is
 * there of the same config.
 */
export async function makeFiles(folder: string, config: Flux2Config, blockCase: BlockCase): Promise<void> {
  await mkdir(folder, { recursive: true })
  await requireConfig(join(folder, 'config.json'), JSON.stringify(config))
  const weights = join(folder, `${weightsName(blockCase)}.safetensors`)
  if (!existsSync(weights)) await writeSafetensors(weights, blockWeights(config, blockCase), { format: 'pt' })
  const inputs = inputsFile(folder, blockCase)
  if (!existsSync(inputs)) await writeSafetensors(inputs, blockInputs(config, blockCase))
}

async function requireConfig(path: string, text: string): Promise<void> {
  if (!existsSync(path)) await writeFile(path, text)
  if ((await readFile(path, 'utf8')) !== text) throw new Error(`${path} is of another benchmark: remove the folder`)
}

/** Of the scale that keeps the variance of what they multiply; those of norms are around 1. */
function blockWeights(config: Flux2Config, { block }: BlockCase): ReadonlyMap<string, Tensor> {
  const parameters = Flux2Transformer2DModel.fromConfig(config).namedParameters()
  const own = [...parameters].filter(([name]) => name.startsWith(PREFIXES[block]))
  return new Map(
    own.map(([name, { shape }]) => {
      const [, features] = shape
      const spread = features === undefined ? { mean: 1, deviation: 0.1 } : { mean: 0, deviation: features ** -0.5 }
      return [name, randomTensor(name, shape, spread)]
    }),
  )
}

function blockInputs(config: Flux2Config, blockCase: BlockCase): ReadonlyMap<string, Tensor> {
  const { tokens } = blockCase
  const { cos, sin } = rotaryTables(positions(tokens), config.axes_dims_rope, config.rope_theta)
  const random = Object.entries(inputTypes(config, blockCase))
    .filter(([name]) => !name.startsWith('rotary'))
    .map(([name, { shape }]) => [name, randomTensor(name, shape, { mean: 0, deviation: 1 })] as const)
  return new Map<string, Tensor>([...random, ['rotary_cos', cos], ['rotary_sin', sin]])
}

/** (T, H, W, L) of text tokens, then of image tokens: int32 `[tokens, 4]`. */
function positions(tokens: number): Tensor<'int32'> {
  const text = textTokensOf(tokens)
  const ids = Array.from({ length: tokens }, (_, i) => {
    const pixel = i - text
    return i < text ? [0, 0, 0, i] : [0, Math.floor(pixel / IMAGE_WIDTH), pixel % IMAGE_WIDTH, 0]
  })
  return Tensor.int32([tokens, 4], ids.flat())
}
