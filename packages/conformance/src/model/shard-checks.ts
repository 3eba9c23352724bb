import assert from 'node:assert/strict'
import { createHash } from 'node:crypto'
import { readFile } from 'node:fs/promises'
import {
  Checkpoint,
  formatPlacement,
  type ModelClass,
  type ModelMixin,
  REPLICATED,
  readConfig,
  resolvePlan,
  shardSlices,
} from '@rankwise/core'
import type { Check } from '../check.ts'
import type { ModelCheckpoint } from './options.ts'

interface GoldenShard {
  /** `S(0)`, `S(1)` or `plain`, as torch prints placements; blocks do not show there. */
  readonly placement: string
  readonly shape: readonly number[]
  readonly sha256: string
}

type GoldenShards = Readonly<Record<string, readonly Readonly<Record<string, GoldenShard>>[]>>

/** The weights of a checkpoint, and every rank's part of them. */
export function checkpointChecks(type: ModelClass<ModelMixin>, checkpoint: ModelCheckpoint): readonly Check[] {
  const { name, directory, shards } = checkpoint
  const weights: Check = {
    title: `${name} has the weights of the model, in their shapes`,
    run: async () => {
      const model = type.fromConfig(await readConfig(directory))
      await using opened = await Checkpoint.open(directory, weightsNameOf(type))
      for (const [parameter, { shape }] of model.namedParameters()) {
        const tied = type.tiedWeights?.[parameter] ?? parameter
        const info = opened.tensors.get(parameter) ?? opened.tensors.get(tied)
        assert.deepEqual(info?.shape, shape, parameter)
      }
    },
  }
  if (shards === undefined) return [weights]
  return [
    weights,
    {
      title: `${name} gives every rank the shards that the reference implementation gives it`,
      timeoutMs: 60_000,
      run: async () => {
        const golden = JSON.parse(await readFile(shards, 'utf8')) as GoldenShards
        const degrees = Object.entries(golden).filter(([key]) => /^tp\d+$/.test(key))
        assert.ok(degrees.length > 0, 'there are shards to compare with')
        for (const [key, ranks] of degrees) {
          const tpDegree = Number(key.slice(2))
          assert.equal(ranks.length, tpDegree)
          for (const [rank, expected] of ranks.entries()) {
            assert.deepEqual(await shardsOf(type, directory, rank, tpDegree), expected, `rank ${rank} of ${tpDegree}`)
          }
        }
      },
    },
  ]
}

/** This rank's shard of every weight, read as `fromPretrained` reads it. */
async function shardsOf(type: ModelClass<ModelMixin>, directory: string, rank: number, tpDegree: number) {
  const model = type.fromConfig(await readConfig(directory))
  const placements = resolvePlan(model, type.tensorParallelPlan ?? {})
  await using checkpoint = await Checkpoint.open(directory, weightsNameOf(type))
  const shards: Record<string, GoldenShard> = {}
  for (const [parameter] of model.namedParameters()) {
    const placement = placements.get(parameter)?.placement ?? REPLICATED
    const { data, shape } = await checkpoint.source(parameter, shardSlices(placement, rank, tpDegree)).read()
    const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength)
    const sha256 = createHash('sha256').update(bytes).digest('hex')
    shards[parameter] = { placement: torchName(formatPlacement(placement)), shape, sha256 }
  }
  return shards
}

function weightsNameOf({ weightsName }: ModelClass<ModelMixin>) {
  return weightsName === undefined ? {} : { weightsName }
}

function torchName(placement: string): string {
  return placement === 'replicated' ? 'plain' : placement.replace(/^shard\((\d).*/, 'S($1)')
}
