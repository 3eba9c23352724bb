import { createHash } from 'node:crypto'
import { readFileSync } from 'node:fs'
import { readdir, readFile } from 'node:fs/promises'
import { join, relative } from 'node:path'
import { describe, expect, test } from 'vitest'
import { referencePath } from '../../../fixtures/src/reference.ts'
import { Checkpoint } from '../../src/checkpoint/checkpoint.ts'
import { readSafetensors, SafetensorsFile } from '../../src/checkpoint/safetensors-file.ts'
import { shard, shardSlices } from '../../src/placement.ts'
import { writeSafetensors } from '../../src/save/write-safetensors.ts'
import type { Tensor } from '../../src/tensor.ts'
import { temporaryFolder } from './files.ts'

interface ShardGolden {
  readonly placement: 'plain' | 'S(0)' | 'S(1)'
  readonly shape: readonly number[]
  readonly sha256: string
}

/** Every parameter of every rank (list index), as diffusers sharded it. */
type ShardGoldens = Readonly<Record<'tp2' | 'tp4', readonly Readonly<Record<string, ShardGolden>>[]>>

/** Packed weights of the tiny models: q, k, v, gate, up by rows; attention, mlp by columns. */
const BLOCKS: readonly (readonly [name: RegExp, dim: number, blocks: readonly number[]])[] = [
  [/\.to_qkv_mlp_proj\.weight$/, 0, [64, 64, 64, 192, 192]],
  [/^single_transformer_blocks\.\d+\.attn\.to_out\.weight$/, 1, [64, 192]],
  [/\.linear_in\.weight$/, 0, [192, 192]],
]

describe.each(['flux2-tiny', 'flux2-klein-tiny', 'flux2-tiny-bf16'])('%s', (model) => {
  const goldens: ShardGoldens = JSON.parse(readFileSync(referencePath('goldens', 'tp', `${model}.shards.json`), 'utf8'))

  test.each([2, 4] as const)('every shard of %i ranks has the bytes that diffusers loads', async (tpDegree) => {
    await using checkpoint = await Checkpoint.open(referencePath(model, 'transformer'))
    const ranks = goldens[`tp${tpDegree}`]
    expect(ranks).toHaveLength(tpDegree)
    for (const [rank, parameters] of ranks.entries()) {
      expect([...checkpoint.tensors.keys()].sort()).toEqual(Object.keys(parameters).sort())
      for (const [name, golden] of Object.entries(parameters)) {
        const tensor = await checkpoint.read(name, slicesOf(checkpoint, name, golden, rank, tpDegree))
        expect(tensor.shape, name).toEqual(golden.shape)
        expect(sha256(tensor), `${name} of rank ${rank}`).toBe(golden.sha256)
      }
    }
    expectSmallBuffers(checkpoint, ranks[0] ?? {})
  })
})

test('the reference implementation writes the same bytes', async () => {
  const root = referencePath()
  const files = (await readdir(root, { recursive: true })).filter((file) => file.endsWith('.safetensors'))
  expect(files.length).toBeGreaterThan(20)
  const copy = join(await temporaryFolder(), 'copy.safetensors')
  for (const file of files) {
    await using original = await SafetensorsFile.open(join(root, file))
    const metadata = original.metadata.size > 0 ? Object.fromEntries(original.metadata) : undefined
    await writeSafetensors(copy, await readSafetensors(original.path), metadata)
    const same = (await readFile(copy)).equals(await readFile(original.path))
    expect(same, relative(root, original.path)).toBe(true)
  }
})

function slicesOf(checkpoint: Checkpoint, name: string, { placement }: ShardGolden, rank: number, tpDegree: number) {
  if (placement === 'plain') return undefined
  const dim = placement === 'S(0)' ? 0 : 1
  const size = checkpoint.tensors.get(name)?.shape[dim] as number
  const packed = BLOCKS.find(([pattern, packedDim]) => packedDim === dim && pattern.test(name))
  return shardSlices(shard(dim, packed?.[2] ?? [size]), rank, tpDegree)
}

function expectSmallBuffers(checkpoint: Checkpoint, goldens: Readonly<Record<string, ShardGolden>>): void {
  for (const [name, { placement }] of Object.entries(goldens)) {
    const full = checkpoint.tensors.get(name)?.byteLength as number
    const largest = checkpoint.stats.largestBuffers.get(name) as number
    if (placement === 'plain') expect(largest).toBe(full)
    else expect(largest, name).toBeLessThan(full)
  }
}

function sha256({ data }: Tensor): string {
  return createHash('sha256')
    .update(new Uint8Array(data.buffer, data.byteOffset, data.byteLength))
    .digest('hex')
}
