import { createHash } from 'node:crypto'
import { readFile } from 'node:fs/promises'
import { Checkpoint, formatPlacement, REPLICATED, readConfig, resolvePlan, shardSlices } from '@rankwise/core'
import { referencePath } from '@rankwise/fixtures'
import { describe, expect, it } from 'vitest'
import { Flux2Transformer2DModel } from '../src/index.ts'

interface GoldenShard {
  readonly placement: string
  readonly shape: readonly number[]
  readonly sha256: string
}

type GoldenShards = Readonly<Record<string, readonly Readonly<Record<string, GoldenShard>>[]>>

/** This rank's shard of every weight, read from the checkpoint as `fromPretrained` reads it. */
async function shardsOf(
  name: string,
  rank: number,
  tpDegree: number,
  plan = Flux2Transformer2DModel.tensorParallelPlan,
) {
  const directory = referencePath(name, 'transformer')
  const model = Flux2Transformer2DModel.fromConfig(await readConfig(directory))
  const placements = resolvePlan(model, plan)
  await using checkpoint = await Checkpoint.open(directory)
  const shards: Record<string, GoldenShard> = {}
  for (const [parameter] of model.namedParameters()) {
    const placement = placements.get(parameter)?.placement ?? REPLICATED
    const { data, shape } = await checkpoint.source(parameter, shardSlices(placement, rank, tpDegree)).read()
    const sha256 = createHash('sha256')
      .update(new Uint8Array(data.buffer, data.byteOffset, data.byteLength))
      .digest('hex')
    shards[parameter] = { placement: torchName(formatPlacement(placement)), shape, sha256 }
  }
  return shards
}

/** `S(0)` as torch prints it; blocks do not show there. */
function torchName(placement: string): string {
  return placement === 'replicated' ? 'plain' : placement.replace(/^shard\((\d).*/, 'S($1)')
}

describe.each(['flux2-tiny', 'flux2-klein-tiny', 'flux2-tiny-bf16'])('%s', (name) => {
  it.each([2, 4])('gives every rank the shards that diffusers gives it at degree %i', async (tpDegree) => {
    const golden: GoldenShards = JSON.parse(
      await readFile(referencePath('goldens', 'tp', `${name}.shards.json`), 'utf8'),
    )
    const ranks = golden[`tp${tpDegree}`] ?? []
    expect(ranks).toHaveLength(tpDegree)
    for (const [rank, expected] of ranks.entries()) expect(await shardsOf(name, rank, tpDegree)).toEqual(expected)
  })
})

it('notices a fused projection that is split without its blocks', async () => {
  const name = 'flux2-klein-tiny'
  const golden: GoldenShards = JSON.parse(await readFile(referencePath('goldens', 'tp', `${name}.shards.json`), 'utf8'))
  const plan = {
    ...Flux2Transformer2DModel.tensorParallelPlan,
    'transformer_blocks.*.ff.linear_in': 'colwise' as const,
  }
  expect(await shardsOf(name, 0, 2, plan)).not.toEqual(golden.tp2?.[0])
})
