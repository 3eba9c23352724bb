import { type ModelMixin, partition } from '@rankwise/core'
import { type CheckGroup, defineChecks } from './check.ts'
import { goldenGroups } from './model/golden-checks.ts'
import type { ModelConformanceOptions } from './model/options.ts'
import { planChecks } from './model/plan-checks.ts'
import { checkpointChecks } from './model/shard-checks.ts'

/** Everything that is checked of a model, for those who run it without vitest. */
export function modelChecks<M extends ModelMixin>(options: ModelConformanceOptions<M>): readonly CheckGroup[] {
  const { model, checkpoints, degrees = [1, 2, 4], exchanges } = options
  const plans = checkpoints.map(({ name, directory }): CheckGroup => {
    return { title: `the plan of ${name}`, checks: planChecks({ model, directory, degrees, exchanges, partition }) }
  })
  const weights = checkpoints.map((checkpoint): CheckGroup => {
    return { title: `the weights of ${checkpoint.name}`, checks: checkpointChecks(model, checkpoint) }
  })
  return [...plans, ...weights, ...goldenGroups(options)]
}

/**
 * Defines the tests that every model passes: its plan computes at every degree what the whole model does, deals every
 * element of a weight to one rank, and takes no other degree; checkpoints fit; every rank's shards are those of the
 * reference implementation; outputs agree with it at every degree, and all ranks hold the same bits.
 */
export function defineModelConformance<M extends ModelMixin>(options: ModelConformanceOptions<M>): void {
  defineChecks('a model', modelChecks(options))
}
