import type { TensorType } from '../graph.ts'
import { defineOp, type PlacementContext, shapeError } from '../op.ts'
import { type Placement, REPLICATED } from '../placement.ts'
import { sizeOf } from '../tensor.ts'

type NormAttributes = { eps: number }

/** Normalisation over the last dimension: every element of it has to be on the same rank. */
function placeNorm(context: PlacementContext<NormAttributes>): Placement {
  const placement = context.complete(0)
  if (placement.kind === 'shard' && placement.dim === context.input(0).shape.length - 1) {
    context.illegal(
      'PLACEMENT_NORM',
      'a norm is never taken across a sharded dimension',
      'split heads before a per-head norm, or complete the value with a rowwise projection first',
    )
  }
  for (let i = 1; i < context.inputs.length; i++) {
    if (context.placement(i).kind === 'replicated') continue
    context.illegal('PLACEMENT_NORM_WEIGHT', 'weights of a norm are replicated', 'take the norm out of the plan')
  }
  return placement
}

/** `layer_norm(x, weight?, bias?)` and `rms_norm(x, weight?)` over the last dimension, with weights of its size. */
function defineNorm(name: string, flopsPerElement: number): void {
  defineOp<NormAttributes>({
    name,
    infer(inputs) {
      const [x, ...weights] = inputs
      const width = x?.shape.at(-1)
      const fits = weights.every((w) => w.dtype === x?.dtype && w.shape.length === 1 && w.shape[0] === width)
      if (x === undefined || width === undefined || !fits) {
        throw shapeError(name, inputs, 'weight and bias have the size of the last dimension, and the dtype of x')
      }
      return [x]
    },
    place: (context) => [placeNorm(context)],
    cost: (_inputs, [output]) => ({ flops: flopsPerElement * sizeOf((output as TensorType).shape) }),
  })
}

defineNorm('layer_norm', 8)
defineNorm('rms_norm', 5)

/** The only placement of operations that no plan shards yet. */
export function placeReplicated(context: PlacementContext): Placement {
  if (context.inputs.some((_, i) => context.complete(i).kind === 'shard')) {
    context.illegal(
      'PLACEMENT_REPLICATED_ONLY',
      `${context.op} takes replicated values`,
      'take its producer out of the plan',
    )
  }
  return REPLICATED
}

type GroupNormAttributes = { groups: number; eps: number }

/** `group_norm(x [batch, channels, height, width], weight [channels], bias [channels])`. */
defineOp<GroupNormAttributes>({
  name: 'group_norm',
  infer(inputs, { groups }) {
    const [x, weight, bias] = inputs as [TensorType, TensorType, TensorType]
    const channels = x.shape[1] ?? 0
    const fits = [weight, bias].every(({ dtype, shape }) => dtype === x.dtype && shape[0] === channels)
    if (x.shape.length !== 4 || channels % groups !== 0 || !fits) {
      throw shapeError(
        'group_norm',
        inputs,
        `x is [batch, channels, height, width] with channels in ${groups} equal groups, weight and bias of its dtype`,
      )
    }
    return [x]
  },
  place: (context) => [placeReplicated(context)],
  cost: (_inputs, [output]) => ({ flops: 8 * sizeOf((output as TensorType).shape) }),
})
