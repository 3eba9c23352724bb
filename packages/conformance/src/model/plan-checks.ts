import assert from 'node:assert/strict'
import {
  checkPlan,
  type Graph,
  isFloatingPoint,
  legalDegreesOf,
  type ModelClass,
  type ModelMixin,
  type ParameterPlacements,
  type PlacedGraph,
  partsOf,
  REPLICATED,
  readConfig,
  resolvePlan,
  sizeOf,
  Tensor,
} from '@rankwise/core'
import { runGraph, runRanks, shardTensor } from '@rankwise/core/reference'
import { type Check, expectCode } from '../check.ts'
import { expectClose } from '../compare/expect-close.ts'
import { toleranceOf } from '../compare/tolerance-table.ts'
import { normal } from '../ops/random.ts'

/** A model class and a config of it. */
export interface PlanSubject {
  readonly model: ModelClass<ModelMixin>
  /** Folder with a config.json. */
  readonly directory: string
  readonly degrees: readonly number[]
  readonly exchanges: number | undefined
  /** How graphs are split; another one only where the suite itself is tested. */
  readonly partition: (graph: Graph, placements: ParameterPlacements, tpDegree: number) => PlacedGraph
}

/** What holds for a plan without any backend: everything is computed in float64, on random weights. */
export function planChecks(subject: PlanSubject): readonly Check[] {
  const { model: type, degrees } = subject
  const create = async () => type.fromConfig(await readConfig(subject.directory))
  const placementsOf = (model: ModelMixin) => resolvePlan(model, type.tensorParallelPlan ?? {})
  return [
    {
      title: `can be split over ${degrees.join(', ')} ranks, and no degree in between is taken`,
      run: async () => {
        const model = await create()
        const legal = legalDegreesOf(type, model)
        for (const degree of degrees) checkPlan(type, model, degree, degree > 1)
        const illegal = Array.from({ length: Math.max(...degrees) + 1 }, (_, i) => i + 1).filter(
          (n) => !legal.includes(n),
        )
        for (const degree of illegal) {
          const checked = Promise.resolve().then(() => checkPlan(type, model, degree, true))
          await expectCode(checked, 'HEADS_NOT_DIVISIBLE', 'BLOCK_NOT_DIVISIBLE')
        }
      },
    },
    {
      title: 'deals every element of a split weight to exactly one rank, and those of shared heads to as many each',
      run: async () => {
        const model = await create()
        const placements = placementsOf(model)
        for (const degree of degrees) {
          for (const [name, { shape }] of model.namedParameters()) checkDealt(name, shape, placements, degree)
        }
      },
    },
    ...degrees.map((degree) => ({
      title: `computes at degree ${degree} what the whole model does`,
      run: async () => checkDegree(await create(), subject, degree),
    })),
  ]
}

/** Counts elements by numbering them: the ranks together hold every number once, or as often as ranks share a head. */
function checkDealt(name: string, shape: readonly number[], placements: ParameterPlacements, tpDegree: number): void {
  const { placement } = placements.get(name) ?? { placement: REPLICATED }
  const numbered = new Tensor(
    'float64',
    shape,
    Float64Array.from({ length: sizeOf(shape) }, (_, i) => i),
  )
  const ranks = Array.from({ length: tpDegree }, (_, rank) => shardTensor(numbered, placement, rank, tpDegree).data)
  if (placement.kind === 'replicated') {
    for (const held of ranks) assert.equal(held.length, numbered.data.length, `every rank holds all of ${name}`)
    return
  }
  const owners = placement.kind === 'shard' ? tpDegree / partsOf(placement, tpDegree) : 1
  const counts = new Float64Array(numbered.data.length)
  for (const element of ranks.flatMap((held) => [...held])) counts[element] = (counts[element] ?? 0) + 1
  const uneven = counts.findIndex((count) => count !== owners)
  assert.equal(uneven, -1, `element ${uneven} of ${name} is on ${owners} ${owners === 1 ? 'rank' : 'ranks'}`)
}

async function checkDegree(model: ModelMixin, subject: PlanSubject, tpDegree: number): Promise<void> {
  const graph = model.traceExample()
  const placements = resolvePlan(model, subject.model.tensorParallelPlan ?? {})
  const placed = subject.partition(graph, placements, tpDegree)
  const exchanges = placed.phases.filter(({ allReduce }) => allReduce !== undefined).length
  if (subject.exchanges !== undefined) assert.equal(exchanges, subject.exchanges, 'all-reduces of traceExample()')
  const [weights, inputs] = [randomWeights(graph), randomInputs(graph)]
  const expected = runGraph(graph, weights, inputs)
  const ranks = runRanks(placed, weights, inputs)
  assert.equal(ranks.length, tpDegree)
  for (const outputs of ranks) {
    for (const [name, whole] of Object.entries(expected)) {
      expectClose(outputs[name] as Tensor, whole, toleranceOf('model', 'float64', whole))
    }
  }
}

/** Of a size that keeps values near 1, and all different, so that no mistake cancels another. */
function randomWeights(graph: Graph): Readonly<Record<string, Tensor>> {
  return Object.fromEntries(
    graph.parameters.map(({ name = '', shape }, i) => {
      const spread = shape.length > 1 ? { deviation: sizeOf(shape.slice(1)) ** -0.5 } : { mean: 0.5, deviation: 0.5 }
      return [name, normal(shape, 100 + i, spread)]
    }),
  )
}

function randomInputs(graph: Graph): Readonly<Record<string, Tensor>> {
  return Object.fromEntries(
    graph.inputs.map(({ name = '', shape, dtype }, i) => {
      if (isFloatingPoint(dtype)) return [name, normal(shape, 1 + i)]
      const ids = Int32Array.from({ length: sizeOf(shape) }, (_, at) => at % 2)
      return [name, Tensor.int32(shape, ids)]
    }),
  )
}
