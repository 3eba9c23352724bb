import { readFile } from 'node:fs/promises'
import { expect } from 'vitest'
import { referencePath } from '../../../fixtures/src/reference.ts'
import type { WeightSource } from '../../src/checkpoint/index.ts'
import { HubCheckpoint, type HubOptions, HubRepository } from '../../src/hub/index.ts'
import {
  packedColwise,
  packedRowwise,
  REPLICATED,
  resolvePlan,
  type ShardSlices,
  shardSlices,
  type Tensor,
  type TensorParallelPlan,
} from '../../src/index.ts'
import { modelOf } from '../checkpoint-model.ts'
import { sha256 } from './hub-server.ts'
import { ID } from './hub-setup.ts'

/** Where the transformer of the tiny pipeline is. */
export const TRANSFORMER = { subfolder: 'transformer' }

// The plan of diffusers 0.42 for FLUX.2.
const PLAN: TensorParallelPlan = Object.fromEntries([
  ...['to_q', 'to_k', 'to_v', 'add_q_proj', 'add_k_proj', 'add_v_proj'].map((name) => [
    `transformer_blocks.*.attn.${name}`,
    'colwise',
  ]),
  ...['to_out.0', 'to_add_out'].map((name) => [`transformer_blocks.*.attn.${name}`, 'rowwise']),
  ...['ff', 'ff_context'].flatMap((name) => [
    [`transformer_blocks.*.${name}.linear_in`, packedColwise([1, 1])],
    [`transformer_blocks.*.${name}.linear_out`, 'rowwise'],
  ]),
  ['single_transformer_blocks.*.attn.to_qkv_mlp_proj', packedColwise([1, 1, 1, 3, 3])],
  ['single_transformer_blocks.*.attn.to_out', packedRowwise([1, 3])],
])

interface Shard {
  readonly shape: readonly number[]
  readonly sha256: string
}

/** Opens the transformer. */
export async function openTransformer(options: HubOptions): Promise<HubCheckpoint> {
  return HubCheckpoint.open(await HubRepository.open(ID, options), TRANSFORMER)
}

/** The slices of a rank, by weight, in the order of the files. */
export function slicesOf({ tensors }: WeightSource, rank: number, tpDegree: number) {
  const placements = resolvePlan(modelOf(tensors), PLAN)
  return [...tensors.keys()].map(
    (name) => [name, shardSlices(placements.get(name)?.placement ?? REPLICATED, rank, tpDegree)] as const,
  )
}

/** Takes all sources, then reads them in order. */
export async function readAll(
  checkpoint: WeightSource,
  slices: readonly (readonly [name: string, slices: ShardSlices | undefined])[],
): Promise<Map<string, Tensor>> {
  const sources = slices.map(([name, part]) => checkpoint.source(name, part))
  const tensors = new Map<string, Tensor>()
  for (const source of sources) tensors.set(source.name, await source.read())
  return tensors
}

/** The memory of a tensor. */
export function bytesOf({ data }: Tensor): Uint8Array {
  return new Uint8Array(data.buffer, data.byteOffset, data.byteLength)
}

/** Compares a rank's shards with those of diffusers. */
export async function expectGolden(
  tensors: ReadonlyMap<string, Tensor>,
  rank: number,
  tpDegree: number,
): Promise<void> {
  const golden = JSON.parse(await readFile(referencePath('goldens', 'tp', 'flux2-klein-tiny.shards.json'), 'utf8'))
  for (const [name, expected] of Object.entries<Shard>(golden[`tp${tpDegree}`][rank])) {
    const tensor = tensors.get(name) as Tensor
    expect({ shape: tensor.shape, sha256: sha256(bytesOf(tensor)) }, name).toMatchObject({
      shape: expected.shape,
      sha256: expected.sha256,
    })
  }
}
