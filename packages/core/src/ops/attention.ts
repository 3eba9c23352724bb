import { itemSize } from '../dtype.ts'
import type { TensorType } from '../graph.ts'
import { defineOp, type PlacementContext, shapeError } from '../op.ts'
import { isShared, type Placement, partsOf, REPLICATED, type Shard } from '../placement.ts'
import { sizeOf } from '../tensor.ts'

type AttentionAttributes = { scale: number; causal: boolean }

/** Whether an operand has the dtype of x, or is float32 where x is 16 bits: both are computed with in float32. */
function fitsDType({ dtype }: TensorType, x: TensorType): boolean {
  return dtype === x.dtype || (dtype === 'float32' && itemSize(x.dtype) === 2)
}

/**
 * Scaled dot-product attention. q is `[batch, queries, heads, headDim]`, k and v are `[batch, keys, kvHeads, headDim]`
 * with `heads` a multiple of `kvHeads`; an optional bias `[batch or 1, 1, queries, keys]` is added to the scores before
 * the softmax. q, k and v have one dtype; the bias has it too, or is float32 where they are 16 bits. A query whose keys are
 * all masked by -Infinity gives zeros, as torch's does.
 */
defineOp<AttentionAttributes>({
  name: 'attention',
  infer(inputs) {
    const [q, k, v, bias] = inputs as [TensorType, TensorType, TensorType, TensorType | undefined]
    const [batch, queries, heads, width] = q.shape
    const [keyBatch, keys, kvHeads, keyWidth] = k.shape
    const fits =
      q.shape.length === 4 &&
      k.shape.length === 4 &&
      v.shape.length === 4 &&
      k.dtype === q.dtype &&
      v.dtype === q.dtype &&
      keyBatch === batch &&
      keyWidth === width &&
      (heads as number) % (kvHeads as number) === 0 &&
      v.shape.slice(0, 3).every((size, i) => size === k.shape[i])
    const biasFits =
      bias === undefined ||
      (fitsDType(bias, q) &&
        bias.shape.length === 4 &&
        (bias.shape[0] === batch || bias.shape[0] === 1) &&
        bias.shape[1] === 1 &&
        bias.shape[2] === queries &&
        bias.shape[3] === keys)
    if (!fits || !biasFits) {
      throw shapeError(
        'attention',
        inputs,
        'q [b, s, h, d], k and v [b, t, g, d] with h % g = 0 of one dtype, bias [b or 1, 1, s, t] of that dtype or float32',
      )
    }
    return [{ dtype: q.dtype, shape: [...q.shape.slice(0, 3), v.shape[3] as number] }]
  },
  place: (context) => [placeAttention(context)],
  cost([q, k], [output]) {
    const scores = 2 * sizeOf((q as TensorType).shape) * ((k as TensorType).shape[1] as number)
    const mixing = 2 * sizeOf((output as TensorType).shape) * ((k as TensorType).shape[1] as number)
    return { flops: scores + mixing }
  },
})

/** Heads are independent of each other; tokens and features of a head are not. */
function placeAttention(context: PlacementContext): Placement {
  const placements = [0, 1, 2].map((i) => context.complete(i))
  const biasComplete = context.inputs.length < 4 || context.complete(3).kind === 'replicated'
  if (biasComplete && placements.every((placement) => placement.kind === 'replicated')) return REPLICATED
  const onHeads = placements.every(
    (placement): placement is Shard =>
      placement.kind === 'shard' && placement.dim === 2 && placement.blocks.length === 1,
  )
  if (!onHeads || !biasComplete) {
    context.illegal(
      'PLACEMENT_ATTENTION',
      'q, k and v are all replicated, or all sharded over their heads',
      "mark the projections of q, k and v 'colwise' together",
    )
  }
  if (!headsMeet(context, placements)) {
    context.illegal(
      'PLACEMENT_ATTENTION_HEADS',
      'ranks that share heads share whole ones, of k and v alike, and have queries of their own',
      "mark the projection of q 'colwise' and those of k and v with colwiseHeads of their number of heads",
    )
  }
  return placements[0] as Placement
}

/** Whether every rank has the heads of keys and values that its queries read. */
function headsMeet({ inputs, tpDegree }: PlacementContext, [q, k, v]: readonly Shard[]): boolean {
  if (q === undefined || k === undefined || v === undefined || isShared(q, tpDegree)) return false
  if (partsOf(k, tpDegree) !== partsOf(v, tpDegree)) return false
  return !isShared(k, tpDegree) || k.heads === inputs[1]?.shape[2]
}

type RopeAttributes = { interleaved: boolean }

/**
 * Rotary position embedding of x `[batch, tokens, heads, headDim]` by cos and sin `[tokens, headDim / 2]`. Interleaved
 * rotates the pairs (2i, 2i + 1), otherwise the pairs (i, i + headDim / 2). The tables have the dtype of x, or are float32
 * where x is 16 bits, as diffusers has them.
 */
defineOp<RopeAttributes>({
  name: 'rope',
  infer(inputs) {
    const [x, cos, sin] = inputs as [TensorType, TensorType, TensorType]
    const fits = [cos, sin].every(
      (table) =>
        fitsDType(table, x) &&
        table.dtype === cos.dtype &&
        table.shape.length === 2 &&
        table.shape[0] === x.shape[1] &&
        table.shape[1] === (x.shape[3] as number) / 2,
    )
    if (x.shape.length !== 4 || !fits) {
      throw shapeError(
        'rope',
        inputs,
        'x is [batch, tokens, heads, headDim], cos and sin are [tokens, headDim / 2] of its dtype or float32',
      )
    }
    return [x]
  },
  place(context) {
    const x = context.complete(0)
    const tables = [context.complete(1), context.complete(2)]
    if (tables.some((table) => table.kind === 'shard') || (x.kind === 'shard' && x.dim !== 2 && x.dim !== 0)) {
      context.illegal('PLACEMENT_ROPE', 'rope runs on whole heads and whole sequences', 'shard the heads')
    }
    return [x]
  },
  cost: (_inputs, [output]) => ({ flops: 3 * sizeOf((output as TensorType).shape) }),
})
