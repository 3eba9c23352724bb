import type { Collectives } from './collectives.ts'
import { RankwiseError } from './errors.ts'
import type { Graph } from './graph.ts'
import type { Module } from './module.ts'
import { partition } from './partition.ts'
import { checkDegree, legalDegrees, type ParameterPlacements, resolvePlan, type TensorParallelPlan } from './plan.ts'
import { getProcessGroup } from './process-group.ts'

/** A model that can be checked against a plan without weights. */
export interface PlannedModel extends Module {
  /** Number of attention heads, which a degree has to divide; undefined where there are none. */
  readonly numAttentionHeads: number | undefined
  /** The model at small shapes. */
  traceExample(): Graph
}

/** A model class, as far as its plan is concerned. */
export interface PlannedClass {
  readonly name: string
  /** Which Linears are split over ranks; a class without one runs on every rank alike. */
  readonly tensorParallelPlan?: TensorParallelPlan | undefined
}

/**
 * Resolves a class's plan and checks it at a degree: heads, blocks, and every placement of the traced model.
 *
 * @param required - whether a class without a plan is refused
 * @throws RankwiseError `PLAN_MISSING`, `PLAN_*`, `HEADS_NOT_DIVISIBLE`, `BLOCK_NOT_DIVISIBLE`, `PLACEMENT_*`
 */
export function checkPlan(
  { name, tensorParallelPlan }: PlannedClass,
  model: PlannedModel,
  tpDegree: number,
  required: boolean,
): ParameterPlacements {
  if (tensorParallelPlan === undefined && required) {
    throw new RankwiseError('PLAN_MISSING', `${name} has no tensor-parallel plan`, {
      where: name,
      rule: 'only a class with a tensorParallelPlan can be split',
    })
  }
  const placements = resolvePlan(model, tensorParallelPlan ?? {})
  checkDegree(placements, model.numAttentionHeads, tpDegree)
  partition(model.traceExample(), placements, tpDegree)
  return placements
}

/** The degrees a model of this class can be split by, ascending. */
export function legalDegreesOf({ tensorParallelPlan }: PlannedClass, model: PlannedModel): readonly number[] {
  return legalDegrees(resolvePlan(model, tensorParallelPlan ?? {}), model.numAttentionHeads)
}

/**
 * The ranks that are going to load a model together, if it is to be split and there is a group. Its size need not be the
 * degree: a rank that got that wrong alone tells the others so.
 */
export function joinedCollectives(tpDegree: number): Collectives | undefined {
  return tpDegree > 1 ? getProcessGroup()?.collectives : undefined
}

/**
 * The ranks that share a model of this degree; undefined at degree 1.
 *
 * @throws RankwiseError `PROCESS_GROUP_NOT_INITIALIZED`, `TP_DEGREE_WORLD_SIZE`
 */
export function collectivesFor(model: string, tpDegree: number): Collectives | undefined {
  if (tpDegree === 1) return undefined
  const group = getProcessGroup()
  if (group === undefined) {
    throw new RankwiseError('PROCESS_GROUP_NOT_INITIALIZED', 'there is no process group to split the model over', {
      where: model,
      actual: { tpDegree },
      remedy: "call initProcessGroup({ backend: 'local' }) first, and start the script with rankwise run",
    })
  }
  if (group.worldSize !== tpDegree) {
    throw new RankwiseError('TP_DEGREE_WORLD_SIZE', `degree ${tpDegree} in a group of ${group.worldSize} ranks`, {
      where: model,
      actual: { tpDegree, worldSize: group.worldSize },
      rule: 'the tensor-parallel degree is the size of the process group',
    })
  }
  return group.collectives
}
