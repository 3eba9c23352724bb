import type { TensorType } from '../graph.ts'
import { defineOp, type PlacedType, type PlacementContext, shapeError } from '../op.ts'
import { isShared, PARTIAL, type Placement, REPLICATED, type Shard, sameBlocks, shard } from '../placement.ts'
import { sizeOf } from '../tensor.ts'

/** `x @ weight.T`, with x `[..., in]` and torch's weight `[out, in]`. A bias is an `add` of its own. */
defineOp({
  name: 'linear',
  infer([x, weight]) {
    const [input, w] = [x as TensorType, weight as TensorType]
    const [out, features] = w.shape
    if (w.shape.length !== 2 || input.shape.length < 1 || input.shape.at(-1) !== features || input.dtype !== w.dtype) {
      throw shapeError('linear', [input, w], 'x is [..., in] and weight [out, in], of one dtype')
    }
    return [{ dtype: input.dtype, shape: [...input.shape.slice(0, -1), out as number] }]
  },
  place(context) {
    const weight = context.placement(1)
    if (weight.kind === 'shard')
      return [weight.dim === 0 ? placeColwise(context, weight) : placeRowwise(context, weight)]
    context.complete(1)
    const x = context.complete(0)
    if (shardsFeatures(context, x)) {
      context.illegal(
        'PLACEMENT_REPLICATED_WEIGHT',
        'a replicated weight needs whole input rows',
        "mark the weight 'rowwise', or its producer's weight replicated",
      )
    }
    return [x]
  },
  cost: ([x], [output]) => ({
    flops: 2 * sizeOf((output as TensorType).shape) * ((x as TensorType).shape.at(-1) ?? 1),
  }),
})

/** Whether an input is sharded over the features that a linear contracts. */
function shardsFeatures(context: PlacementContext, x: Placement): x is Shard {
  return x.kind === 'shard' && x.dim === context.input(0).shape.length - 1
}

function placeColwise(context: PlacementContext, weight: Shard): Placement {
  const x = context.complete(0)
  if (x.kind === 'shard') {
    context.illegal(
      'PLACEMENT_COLWISE_INPUT',
      'a column-wise weight needs a replicated input',
      "an input that is already sharded is completed by 'rowwise' (after split heads: the output projection)",
    )
  }
  return shard((context.outputs[0] as TensorType).shape.length - 1, weight.blocks, weight.heads)
}

function placeRowwise(context: PlacementContext, weight: Shard): Placement {
  const x = context.complete(0)
  const features = context.input(0).shape.length - 1
  if (x.kind === 'replicated' && context.input(1).splitInput === true) {
    context.splits.set(0, shard(features, weight.blocks))
    return PARTIAL
  }
  if (!shardsFeatures(context, x)) {
    context.illegal(
      'PLACEMENT_ROWWISE_INPUT',
      'a row-wise weight needs an input sharded over its features',
      "mark the producer 'colwise', or use 'rowwise_split_input'",
    )
  }
  if (isShared(x, context.tpDegree)) {
    context.illegal(
      'PLACEMENT_ROWWISE_SHARED',
      'what several ranks hold would be added several times',
      "mark the producer 'colwise', which gives every rank elements of its own",
    )
  }
  if (!sameBlocks(x, weight)) {
    context.illegal(
      'PLACEMENT_ROWWISE_BLOCKS',
      `a row-wise weight and its input are split into the same blocks (input ${x.blocks.join('|')}, weight ${weight.blocks.join('|')})`,
      'use packedRowwise with the blocks of the concatenated input',
    )
  }
  return PARTIAL
}

type EmbeddingAttributes = { before?: number; after?: number }

/**
 * Rows of a table `[entries, width]` by int32 ids `[...]`, with `before` and `after` zeros around each: a rank that has
 * some columns of a table fills its row up to a summand of the whole one.
 */
defineOp<EmbeddingAttributes>({
  name: 'embedding',
  infer([ids, table], { before = 0, after = 0 }) {
    const [index, rows] = [ids as TensorType, table as TensorType]
    if (index.dtype !== 'int32' || rows.shape.length !== 2) {
      throw shapeError('embedding', [index, rows], 'ids are int32 and the table is [entries, width]')
    }
    return [{ dtype: rows.dtype, shape: [...index.shape, before + (rows.shape[1] as number) + after] }]
  },
  place(context) {
    const table = context.placement(1)
    const byColumns = table.kind === 'shard' && table.dim === 1 && table.blocks.length === 1
    if (context.placement(0).kind !== 'replicated' || (table.kind !== 'replicated' && !byColumns)) {
      context.illegal(
        'PLACEMENT_EMBEDDING',
        'ids are replicated, and the table is replicated or sharded over its columns',
        "mark the embedding 'colwise', or take it out of the plan",
      )
    }
    return [byColumns ? PARTIAL : REPLICATED]
  },
  localize(attributes, { rank, tpDegree, inputs }) {
    const { placement, shape } = inputs[1] as PlacedType
    if (placement.kind !== 'shard' || tpDegree === 1) return attributes
    const width = shape[1] as number
    return { before: (rank * width) / tpDegree, after: ((tpDegree - 1 - rank) * width) / tpDegree }
  },
  cost: () => ({ flops: 0 }),
})
