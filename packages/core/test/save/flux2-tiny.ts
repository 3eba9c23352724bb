import { createHash } from 'node:crypto'
import { readFileSync } from 'node:fs'
import { referencePath } from '../../../fixtures/src/reference.ts'
import { Checkpoint } from '../../src/checkpoint/checkpoint.ts'
import { shard } from '../../src/placement.ts'
import type { ParameterPlacements } from '../../src/plan.ts'
import type { ParameterPlacement } from '../../src/styles.ts'
import type { Tensor } from '../../src/tensor.ts'

/** A tiny transformer that diffusers saved, in memory. */
export interface TinyModel {
  readonly name: string
  /** Folder that diffusers wrote. */
  readonly directory: string
  /** `max_shard_size` that it was saved with. */
  readonly maxShardSize: string
  readonly config: string
  /** In the order of torch's `state_dict`. */
  readonly tensors: ReadonlyMap<string, Tensor>
  readonly placements: ParameterPlacements
}

/** What diffusers found out about every parameter of every rank (list index). */
export type ShardGoldens = Readonly<
  Record<'tp2' | 'tp4', readonly Readonly<Record<string, { readonly sha256: string }>>[]>
>

export const TINY_MODELS = {
  'flux2-tiny': '700KB',
  'flux2-klein-tiny': '700KB',
  'flux2-tiny-bf16': '400KB',
} as const

export async function tinyModel(name: keyof typeof TINY_MODELS): Promise<TinyModel> {
  const directory = referencePath(name, 'transformer')
  await using checkpoint = await Checkpoint.open(directory)
  const tensors = new Map<string, Tensor>()
  for (const parameter of [...checkpoint.tensors.keys()].sort((a, b) => orderOf(a) - orderOf(b))) {
    tensors.set(parameter, await checkpoint.read(parameter))
  }
  return {
    name,
    directory,
    maxShardSize: TINY_MODELS[name],
    config: readFileSync(`${directory}/config.json`, 'utf8'),
    tensors,
    placements: placementsOf(tensors),
  }
}

export function shardGoldens(name: keyof typeof TINY_MODELS): ShardGoldens {
  return JSON.parse(readFileSync(referencePath('goldens', 'tp', `${name}.shards.json`), 'utf8'))
}

export function sha256({ data }: Tensor): string {
  return createHash('sha256')
    .update(new Uint8Array(data.buffer, data.byteOffset, data.byteLength))
    .digest('hex')
}

/** What tensors are, and a hash of what is in them, by name: cheap to compare, and order does not count. */
export function digests(tensors: ReadonlyMap<string, Tensor>): Readonly<Record<string, string>> {
  const entries = [...tensors].map(([name, tensor]) => [name, `${tensor.dtype} [${tensor.shape}] ${sha256(tensor)}`])
  return Object.fromEntries(entries)
}

/** Modules in the order in which the Python class makes them, which is that of its `state_dict`. */
const MODULES = [
  'time_guidance_embed.timestep_embedder.linear_1',
  'time_guidance_embed.timestep_embedder.linear_2',
  'time_guidance_embed.guidance_embedder.linear_1',
  'time_guidance_embed.guidance_embedder.linear_2',
  'double_stream_modulation_img',
  'double_stream_modulation_txt',
  'single_stream_modulation',
  'x_embedder',
  'context_embedder',
  'transformer_blocks.0',
  'transformer_blocks.1',
  'single_transformer_blocks.0',
  'single_transformer_blocks.1',
  'single_transformer_blocks.2',
  'norm_out',
  'proj_out',
]

const BLOCK_MODULES = [
  'attn.to_qkv_mlp_proj',
  'attn.to_q',
  'attn.to_k',
  'attn.to_v',
  'attn.norm_q',
  'attn.norm_k',
  'attn.to_out',
  'attn.norm_added_q',
  'attn.norm_added_k',
  'attn.add_q_proj',
  'attn.add_k_proj',
  'attn.add_v_proj',
  'attn.to_add_out',
  'ff.linear_in',
  'ff.linear_out',
  'ff_context.linear_in',
  'ff_context.linear_out',
]

function orderOf(parameter: string): number {
  const module = MODULES.findIndex((path) => parameter.startsWith(`${path}.`))
  if (module < 0) throw new Error(`the order of ${parameter} is not known`)
  const rest = parameter.slice((MODULES[module] as string).length + 1)
  return module * 100 + BLOCK_MODULES.findIndex((path) => rest.startsWith(`${path}.`))
}

/** The plan of the class, in sizes of the tiny models. */
const SPLIT: readonly (readonly [name: RegExp, dim: number, blocks?: readonly number[]])[] = [
  [/\.attn\.(to_q|to_k|to_v|add_q_proj|add_k_proj|add_v_proj)\.weight$/, 0],
  [/\.attn\.(to_out\.0|to_add_out)\.weight$/, 1],
  [/^transformer_blocks\..*\.linear_in\.weight$/, 0, [192, 192]],
  [/^transformer_blocks\..*\.linear_out\.weight$/, 1],
  [/\.to_qkv_mlp_proj\.weight$/, 0, [64, 64, 64, 192, 192]],
  [/^single_transformer_blocks\.\d+\.attn\.to_out\.weight$/, 1, [64, 192]],
]

function placementsOf(tensors: ReadonlyMap<string, Tensor>): ParameterPlacements {
  const placements = new Map<string, ParameterPlacement>()
  for (const [parameter, { shape }] of tensors) {
    const [, dim, blocks] = SPLIT.find(([name]) => name.test(parameter)) ?? []
    if (dim === undefined) continue
    placements.set(parameter, { placement: shard(dim, blocks ?? [shape[dim] as number]), splitInput: false })
  }
  return placements
}
