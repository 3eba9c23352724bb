import { createHash } from 'node:crypto'
import { readFile } from 'node:fs/promises'
import { describe, expect, it } from 'vitest'
import { referencePath } from '../../fixtures/src/reference.ts'
import {
  Checkpoint,
  type LinearOptions,
  packedColwise,
  packedRowwise,
  REPLICATED,
  resolvePlan,
  shardSlices,
  type Tensor,
  type TensorParallelPlan,
} from '../src/index.ts'
import { ReferenceBackend } from '../src/reference/index.ts'
import { splitWeights } from '../src/split-weights.ts'
import { modelOf } from './checkpoint-model.ts'

// The plans of diffusers 0.42 as data; the models themselves come with packages of their own.
const attention = (blocks: string) =>
  Object.fromEntries([
    ...['to_q', 'to_k', 'to_v', 'add_q_proj', 'add_k_proj', 'add_v_proj'].map((name) => [
      `${blocks}.attn.${name}`,
      'colwise',
    ]),
    ...['to_out.0', 'to_add_out'].map((name) => [`${blocks}.attn.${name}`, 'rowwise']),
  ]) as TensorParallelPlan
const feedForward = (path: string): TensorParallelPlan => ({
  [`${path}.net.0.proj`]: 'colwise',
  [`${path}.net.2`]: 'rowwise',
})

const flux1Plan: TensorParallelPlan = {
  ...attention('transformer_blocks.*'),
  ...feedForward('transformer_blocks.*.ff'),
  ...feedForward('transformer_blocks.*.ff_context'),
  'single_transformer_blocks.*.attn.to_q': 'colwise',
  'single_transformer_blocks.*.attn.to_k': 'colwise',
  'single_transformer_blocks.*.attn.to_v': 'colwise',
  'single_transformer_blocks.*.proj_mlp': 'colwise',
  'single_transformer_blocks.*.proj_out': packedRowwise(),
}
const qwenImagePlan: TensorParallelPlan = {
  ...attention('transformer_blocks.*'),
  ...feedForward('transformer_blocks.*.img_mlp'),
  ...feedForward('transformer_blocks.*.txt_mlp'),
}
const flux2Plan: TensorParallelPlan = {
  ...attention('transformer_blocks.*'),
  'transformer_blocks.*.ff.linear_in': packedColwise([1, 1]),
  'transformer_blocks.*.ff.linear_out': 'rowwise',
  'transformer_blocks.*.ff_context.linear_in': packedColwise([1, 1]),
  'transformer_blocks.*.ff_context.linear_out': 'rowwise',
  'single_transformer_blocks.*.attn.to_qkv_mlp_proj': packedColwise([1, 1, 1, 3, 3]),
  'single_transformer_blocks.*.attn.to_out': packedRowwise([1, 3]),
}

// 4 heads x 16 and an MLP of 4 x 64: what the model's code gives `proj_out`.
const flux1Blocks = (path: string): LinearOptions => (path.endsWith('.proj_out') ? { packedRowBlocks: [64, 256] } : {})

const MODELS: readonly { name: string; plan: TensorParallelPlan; blocks?: (path: string) => LinearOptions }[] = [
  { name: 'flux2-tiny', plan: flux2Plan },
  { name: 'flux2-klein-tiny', plan: flux2Plan },
  { name: 'flux2-tiny-bf16', plan: flux2Plan },
  { name: 'flux1-tiny', plan: flux1Plan, blocks: flux1Blocks },
  { name: 'qwenimage-tiny', plan: qwenImagePlan },
]

interface Shard {
  readonly shape: readonly number[]
  readonly sha256: string
}

function shardOf({ data, shape }: Tensor): Shard {
  const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength)
  return { shape, sha256: createHash('sha256').update(bytes).digest('hex') }
}

describe.each(MODELS)('$name', ({ name, plan, blocks }) => {
  it.each([2, 4])('every rank reads, and splits in memory, what diffusers gives it at degree %i', async (tpDegree) => {
    const golden = JSON.parse(await readFile(referencePath('goldens', 'tp', `${name}.shards.json`), 'utf8'))
    await using checkpoint = await Checkpoint.open(referencePath(name, 'transformer'))
    const placements = resolvePlan(modelOf(checkpoint.tensors, blocks), plan)
    const backend = new ReferenceBackend()
    const whole = new Map()
    const stored = new Map()
    for (const weight of checkpoint.tensors.keys()) {
      const source = checkpoint.source(weight)
      whole.set(weight, await backend.loadShard(source, { dtype: 'float32' }))
      stored.set(whole.get(weight), { byteLength: source.byteLength, isMapped: false })
    }
    const report = { localBytes: 0, fullBytes: 0, readBytes: 0, mappedBytes: 0, largestBuffers: new Map() }
    for (const [rank, shards] of golden[`tp${tpDegree}`].entries()) {
      const target = { placements, rank, tpDegree }
      let localBytes = 0
      const split = await splitWeights(name, { weights: whole, stored, report, backend, dtype: 'float32' }, target)
      for (const [weight, { shape, sha256 }] of Object.entries<Shard>(shards)) {
        const slices = shardSlices(placements.get(weight)?.placement ?? REPLICATED, rank, tpDegree)
        const read = await checkpoint.source(weight, slices).read()
        localBytes += read.byteLength
        expect(shardOf(read), `${weight} as read`).toEqual({ shape, sha256 })
        const held = await backend.download(split.weights.get(weight) ?? whole.get(weight))
        // The backend holds float32; casting back is exact.
        expect(shardOf(held.cast(read.dtype)), `${weight} as split`).toEqual({ shape, sha256 })
      }
      expect(split.report.localBytes).toBe(localBytes)
    }
  })
})
