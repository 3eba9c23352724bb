import { RankwiseError } from '../errors.ts'
import type { Attributes } from '../graph.ts'
import type { Tensor } from '../tensor.ts'
import { attention, rope } from './attention.ts'
import { add, addScalar, cast, cos, div, mul, mulScalar, silu, sin, sub } from './elementwise.ts'
import type { Float64Tensor, ReferenceKernel } from './kernel.ts'
import { embedding, linear } from './linear.ts'
import { concat, reshape, shard, split, transpose } from './movement.ts'
import { groupNorm, layerNorm, rmsNorm } from './norm.ts'
import { conv2d, upsampleNearest2d } from './spatial.ts'

/** Every operation but `all_reduce`, which takes more than one rank. */
const KERNELS: Readonly<Record<string, ReferenceKernel>> = {
  add,
  sub,
  mul,
  div,
  add_scalar: addScalar,
  mul_scalar: mulScalar,
  silu,
  sin,
  cos,
  cast,
  linear,
  embedding,
  reshape,
  transpose,
  split,
  concat,
  shard,
  layer_norm: layerNorm,
  rms_norm: rmsNorm,
  group_norm: groupNorm,
  attention,
  rope,
  conv2d,
  upsample_nearest2d: upsampleNearest2d,
}

/** Whether {@link referenceOp} computes the operation. */
export function hasReferenceOp(op: string): boolean {
  return Object.hasOwn(KERNELS, op)
}

/**
 * What an operation computes, in float64 whatever the dtypes of its operands: the values that backends are compared
 * with. The operands have passed the operation's `infer` rule; the results share no memory with them.
 *
 * @throws RankwiseError `OP_UNKNOWN`, `EMBEDDING_ID`
 */
export function referenceOp(op: string, inputs: readonly Tensor[], attributes: Attributes): readonly Float64Tensor[] {
  const kernel = hasReferenceOp(op) ? KERNELS[op] : undefined
  if (kernel === undefined) {
    throw new RankwiseError('OP_UNKNOWN', `there is no reference for the operation '${op}'`, {
      actual: { known: Object.keys(KERNELS).join(' ') },
    })
  }
  return kernel(attributes as never, ...inputs.map((input) => input.cast('float64')))
}
