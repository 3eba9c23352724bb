import { mkdtemp, readFile, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import {
  type DType,
  type ParallelStyle,
  partition,
  printGraph,
  readConfig,
  resolvePlan,
  TensorParallelConfig,
  type TensorParallelPlan,
} from '@rankwise/core'
import { ReferenceBackend } from '@rankwise/core/reference'
import { referencePath } from '@rankwise/fixtures'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { Flux2Transformer2DModel, flux2Plan } from '../src/index.ts'

const kleinTiny = referencePath('flux2-klein-tiny', 'transformer')
let folder: string

beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), 'rankwise-plan-'))
})
afterAll(() => rm(folder, { recursive: true }))

/** Loads from a folder that has a config and no weights: whatever is refused is refused before a weight is read. */
async function loadWithoutWeights(plan: TensorParallelPlan, tpDegree: number, changes: object = {}): Promise<unknown> {
  const config = JSON.parse(await readFile(join(kleinTiny, 'config.json'), 'utf8'))
  await writeFile(join(folder, 'config.json'), JSON.stringify({ ...config, ...changes }))
  class Planned extends Flux2Transformer2DModel {
    static override readonly tensorParallelPlan = plan
  }
  const parallelConfig = new TensorParallelConfig({ tpDegree })
  return Planned.fromPretrained(folder, { backend: new ReferenceBackend(), parallelConfig })
}

function without(key: string): TensorParallelPlan {
  return Object.fromEntries(Object.entries(flux2Plan).filter(([name]) => name !== key))
}

function withStyle(key: string, style: ParallelStyle): TensorParallelPlan {
  return { ...flux2Plan, [key]: style }
}

const SINGLE_IN = 'single_transformer_blocks.*.attn.to_qkv_mlp_proj'
const SINGLE_OUT = 'single_transformer_blocks.*.attn.to_out'

describe('refusals before a weight is read', () => {
  it.each<[string, TensorParallelPlan, number, object, string, string]>([
    ['3 ranks for 4 heads', flux2Plan, 3, {}, 'HEADS_NOT_DIVISIBLE', 'numAttentionHeads'],
    // An MLP of 8 * 16 * 0.25 = 32 rows splits over 8 ranks, one of 16 * 8 * 0.2421875 = 31 does not.
    [
      'a block of 31 over 2 ranks',
      flux2Plan,
      2,
      { num_attention_heads: 8, mlp_ratio: 0.2421875 },
      'BLOCK_NOT_DIVISIBLE',
      'transformer_blocks.0.ff.linear_in.weight',
    ],
    [
      'a key with two wildcards',
      withStyle('transformer_blocks.*.attn.to_out.*', 'rowwise'),
      2,
      {},
      'PLAN_WILDCARDS',
      'to_out.*',
    ],
    [
      'a wildcard over a module',
      withStyle('time_guidance_embed.*.linear_1', 'colwise'),
      2,
      {},
      'PLAN_WILDCARD_LIST',
      'time_guidance_embed',
    ],
    ['an unknown style', withStyle('proj_out', 'diagonal' as ParallelStyle), 2, {}, 'STYLE_UNKNOWN', 'proj_out'],
    [
      'an unknown path',
      withStyle('transformer_blocks.*.attn.to_x', 'colwise'),
      2,
      {},
      'PLAN_PATH',
      'transformer_blocks.0.attn.to_x',
    ],
    [
      'a norm',
      withStyle('transformer_blocks.*.attn.norm_q', 'colwise'),
      2,
      {},
      'PLAN_NOT_LINEAR',
      'transformer_blocks.0.attn.norm_q',
    ],
    [
      'an output projection split by columns',
      withStyle('transformer_blocks.*.attn.to_out.0', 'colwise'),
      2,
      {},
      'PLACEMENT_COLWISE_INPUT',
      'transformer_blocks.0.attn.to_out.0',
    ],
    [
      'a missing text query',
      without('transformer_blocks.*.attn.add_q_proj'),
      2,
      {},
      'PLACEMENT_CONCAT',
      'transformer_blocks.0.attn',
    ],
    [
      'a fused projection marked plain',
      withStyle(SINGLE_IN, 'colwise'),
      2,
      {},
      'PLACEMENT_SPLIT_BLOCK',
      'single_transformer_blocks.0.attn',
    ],
    [
      'a joined input marked plain',
      withStyle(SINGLE_OUT, 'rowwise'),
      2,
      {},
      'PLACEMENT_ROWWISE_BLOCKS',
      'single_transformer_blocks.0.attn.to_out',
    ],
    [
      'a missing output projection',
      without(SINGLE_OUT),
      2,
      {},
      'PLACEMENT_REPLICATED_WEIGHT',
      'single_transformer_blocks.0.attn.to_out',
    ],
    [
      'a rowwise projection of a whole value',
      withStyle('context_embedder', 'rowwise'),
      2,
      {},
      'PLACEMENT_ROWWISE_INPUT',
      'context_embedder',
    ],
    ['a sharded output', withStyle('proj_out', 'colwise'), 2, {}, 'PLACEMENT_OUTPUT', 'sample'],
  ])('%s', async (_name, plan, tpDegree, changes, code, where) => {
    const error = await loadWithoutWeights(plan, tpDegree, changes).catch((caught: unknown) => caught)
    expect(error).toMatchObject({ code, where: expect.stringContaining(where) })
  })

  it('names both numbers, the rule and the legal degrees', async () => {
    await expect(loadWithoutWeights(flux2Plan, 3)).rejects.toMatchObject({
      actual: { heads: 4, tpDegree: 3, legalDegrees: [1, 2, 4] },
      rule: expect.stringContaining('divisible'),
      remedy: expect.stringContaining('1, 2, 4'),
    })
  })

  it('gets as far as the process group with the right plan', async () => {
    await expect(loadWithoutWeights(flux2Plan, 2)).rejects.toMatchObject({ code: 'PROCESS_GROUP_NOT_INITIALIZED' })
  })

  it('gets as far as the weights on one rank', async () => {
    await expect(loadWithoutWeights(flux2Plan, 1)).rejects.toMatchObject({ code: 'CHECKPOINT_NOT_FOUND' })
  })
})

describe('the traced graph', () => {
  async function placed(tpDegree: number, changes: object = {}, dtype: DType = 'float32') {
    const config = { ...((await readConfig(kleinTiny)) as object), ...changes }
    const model = Flux2Transformer2DModel.fromConfig(config)
    return partition(model.trace({ imageTokens: 6, textTokens: 3, dtype }), resolvePlan(model, flux2Plan), tpDegree)
  }

  it.each([
    [2, 3],
    [8, 48],
    [5, 20],
    [1, 0],
    [0, 1],
  ])('has 2 all-reduces per double block and 1 per single block (%i, %i)', async (num_layers, num_single_layers) => {
    const { phases } = await placed(2, { num_layers, num_single_layers })
    const reduces = phases.flatMap(({ allReduce }) => allReduce ?? [])
    expect(reduces).toHaveLength(2 * num_layers + num_single_layers)
    // Text and image share the exchanges of a double block.
    expect(reduces.map(({ inputs }) => inputs.length)).toEqual([
      ...new Array(2 * num_layers).fill(2),
      ...new Array(num_single_layers).fill(1),
    ])
  })

  it('has as many in bfloat16, of what the projections give', async () => {
    const { phases } = await placed(2, { num_layers: 2, num_single_layers: 3 }, 'bfloat16')
    const reduces = phases.flatMap(({ allReduce }) => allReduce ?? [])
    expect(reduces.map(({ inputs }) => inputs.length)).toEqual([2, 2, 2, 2, 1, 1, 1])
    const nodes = phases.flatMap((phase) => phase.nodes)
    const producers = reduces.flatMap(({ inputs }) =>
      inputs.map((input) => nodes.find(({ outputs }) => outputs.some(({ id }) => id === input.id))?.op),
    )
    expect(new Set(producers)).toEqual(new Set(['linear']))
  })

  it('lets nothing else cross ranks', async () => {
    const { phases } = await placed(2)
    const reduced = new Set(phases.flatMap(({ allReduce }) => allReduce?.outputs ?? []))
    const own = new Set(phases.flatMap(({ nodes }) => nodes.flatMap(({ outputs }) => outputs)))
    for (const { nodes } of phases) {
      for (const input of nodes.flatMap(({ inputs }) => inputs)) {
        expect(input.kind !== 'result' || own.has(input) || reduced.has(input)).toBe(true)
      }
    }
    expect(phases.flatMap(({ nodes }) => nodes.map(({ op }) => op))).not.toContain('shard')
  })

  it('prints as stable text', async () => {
    expect(printGraph(await placed(2, { num_layers: 1, num_single_layers: 1 }))).toMatchSnapshot()
  })
})
