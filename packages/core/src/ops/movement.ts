import type { Attributes, TensorType } from '../graph.ts'
import { defineOp, type PlacedType, type PlacementContext, shapeError } from '../op.ts'
import {
  isShared,
  localShape,
  PARTIAL,
  type Placement,
  partsOf,
  REPLICATED,
  type Shard,
  sameBlocks,
  shard,
} from '../placement.ts'
import { type Shape, sizeOf } from '../tensor.ts'

const free = () => ({ flops: 0 })

function areSizes(sizes: readonly number[]): boolean {
  return sizes.every((size) => Number.isInteger(size) && size >= 0)
}

type ReshapeAttributes = { shape: readonly number[] }

/** The same elements under another shape. */
defineOp<ReshapeAttributes>({
  name: 'reshape',
  movesOnly: true,
  infer([x], { shape }) {
    const input = x as TensorType
    if (!areSizes(shape) || sizeOf(input.shape) !== sizeOf(shape)) {
      throw shapeError(
        'reshape',
        [input, { dtype: input.dtype, shape }],
        'both shapes hold the same number of elements',
      )
    }
    return [{ dtype: input.dtype, shape }]
  },
  place(context) {
    const placement = context.placement(0)
    if (placement.kind !== 'shard') return [placement]
    return [placeReshape(context, placement)]
  },
  localize: (_attributes, { outputs, tpDegree }) => ({ shape: localSize(outputs[0] as PlacedType, tpDegree) }),
  cost: free,
})

function localSize({ shape, placement }: PlacedType, tpDegree: number): Shape {
  return localShape(shape, placement, tpDegree)
}

/**
 * A reshape keeps a shard where it splits or joins dimensions behind the sharded one: `[.., heads * headDim]` to
 * `[.., heads, headDim]` and back. The sharded dimension stays the outermost of its group, so a rank's elements stay
 * together.
 */
function placeReshape(context: PlacementContext, placement: Shard): Placement {
  const { dim, blocks, heads } = placement
  const parts = partsOf(placement, context.tpDegree)
  const input = context.input(0).shape
  const output = (context.outputs[0] as TensorType).shape
  for (const target of sameStart(input, dim, output)) {
    const scaled = blocks.map((size) => (size * (output[target] as number)) / (input[dim] as number))
    if (scaled.every((size) => size > 0 && size % parts === 0)) return shard(target, scaled, heads)
  }
  return context.illegal(
    'PLACEMENT_RESHAPE',
    'a reshape may split the sharded dimension only at multiples of what each rank holds, or join it with inner ones',
    'choose a degree that divides the number of heads, or shard another dimension',
  )
}

/**
 * The dimensions of `output` that begin where dimension `dim` of `input` does, outermost first: several where sizes are
 * 1. Leading dimensions that stay as they are are not among them. At degree 1 an inserted dimension looks like a single
 * head and is taken for one.
 */
function sameStart(input: Shape, dim: number, output: Shape): readonly number[] {
  const before = sizeOf(input.slice(0, dim))
  const changed = input.findIndex((size, i) => i === dim || size !== output[i])
  return [...output.keys()].filter((target) => target >= changed && sizeOf(output.slice(0, target)) === before)
}

type TransposeAttributes = { permutation: readonly number[] }

/** Dimension `i` of the result is dimension `permutation[i]` of the input. */
defineOp<TransposeAttributes>({
  name: 'transpose',
  movesOnly: true,
  infer([x], { permutation }) {
    const input = x as TensorType
    const sorted = [...permutation].sort((a, b) => a - b)
    if (permutation.length !== input.shape.length || sorted.some((dim, i) => dim !== i)) {
      throw shapeError('transpose', [input], `the permutation [${permutation.join(', ')}] names every dimension once`)
    }
    return [{ dtype: input.dtype, shape: permutation.map((dim) => input.shape[dim] as number) }]
  },
  place(context) {
    const placement = context.placement(0)
    if (placement.kind !== 'shard') return [placement]
    return [shard(context.attributes.permutation.indexOf(placement.dim), placement.blocks, placement.heads)]
  },
  cost: free,
})

type SplitAttributes = { dim: number; sizes: readonly number[] }

/** Consecutive pieces along one dimension. */
defineOp<SplitAttributes>({
  name: 'split',
  movesOnly: true,
  infer([x], { dim, sizes }) {
    const input = x as TensorType
    if (!areSizes(sizes) || sizes.reduce((sum, size) => sum + size, 0) !== input.shape[dim]) {
      throw shapeError('split', [input], `the sizes [${sizes.join(', ')}] are whole and add up to dimension ${dim}`)
    }
    return sizes.map((size) => ({ dtype: input.dtype, shape: input.shape.map((s, i) => (i === dim ? size : s)) }))
  },
  place(context) {
    const { dim, sizes } = context.attributes
    const placement = context.placement(0)
    if (placement.kind !== 'shard' || placement.dim !== dim) return sizes.map(() => placement)
    requireOwnParts(context, placement)
    return splitBlocks(context, placement, sizes).map((blocks) => shard(dim, blocks))
  },
  localize: ({ dim }, { outputs, tpDegree }) => ({
    dim,
    sizes: outputs.map((output) => localSize(output, tpDegree)[dim] as number),
  }),
  cost: free,
})

/** Where ranks share heads, what is split or joined along them would no longer be in the order of the ranks. */
function requireOwnParts(context: PlacementContext, placement: Shard): void {
  if (!isShared(placement, context.tpDegree)) return
  context.illegal(
    'PLACEMENT_SHARED_HEADS',
    'a dimension whose heads ranks share is neither split nor joined with another',
    "mark the producer 'colwise', or choose a degree that is not more than its heads",
  )
}

/** Deals the blocks of a sharded dimension out to the pieces of a split; a piece holds whole blocks. */
function splitBlocks(context: PlacementContext, { blocks }: Shard, sizes: readonly number[]): number[][] {
  let next = 0
  return sizes.map((size) => {
    const piece: number[] = []
    let filled = 0
    while (filled < size && next < blocks.length) {
      const block = blocks[next++] as number
      piece.push(block)
      filled += block
    }
    if (filled !== size) {
      context.illegal(
        'PLACEMENT_SPLIT_BLOCK',
        `a split along the sharded dimension cuts between blocks (blocks ${blocks.join('|')}, pieces ${sizes.join('|')})`,
        "use packedColwise with the pieces as blocks instead of 'colwise'",
      )
    }
    return piece
  })
}

type ConcatAttributes = { dim: number }

/** Joins values along one dimension. */
defineOp<ConcatAttributes>({
  name: 'concat',
  movesOnly: true,
  infer(inputs, { dim }) {
    const [first] = inputs
    const fits = inputs.every(
      (input) =>
        input.dtype === first?.dtype &&
        input.shape.length === first.shape.length &&
        input.shape.every((size, i) => i === dim || size === first.shape[i]),
    )
    if (first?.shape[dim] === undefined || !fits)
      throw shapeError('concat', inputs, `shapes agree everywhere but in their dimension ${dim}`)
    const joined = inputs.reduce((sum, input) => sum + (input.shape[dim] as number), 0)
    return [{ dtype: first.dtype, shape: first.shape.map((size, i) => (i === dim ? joined : size)) }]
  },
  place(context) {
    if (context.inputs.every((input) => input.placement.kind === 'partial')) return [PARTIAL]
    const placements = context.inputs.map((_, i) => context.complete(i))
    if (placements.every((placement) => placement.kind === 'replicated')) return [REPLICATED]
    return [placeShardedConcat(context, placements)]
  },
  cost: free,
})

function placeShardedConcat(context: PlacementContext<ConcatAttributes>, placements: readonly Placement[]): Placement {
  const { dim } = context.attributes
  const shards = placements.filter((placement) => placement.kind === 'shard')
  const [first] = shards as [Shard]
  const alike = shards.every((other) => other.dim === first.dim && (first.dim === dim || sameBlocks(other, first)))
  if (shards.length !== placements.length || !alike) {
    context.illegal(
      'PLACEMENT_CONCAT',
      'values that are joined are all replicated, or all sharded alike',
      'give all their producers the same style (for joint attention: q, k, v of both streams)',
    )
  }
  if (first.dim === dim) for (const placement of shards) requireOwnParts(context, placement)
  return first.dim === dim
    ? shard(
        dim,
        shards.flatMap((other) => other.blocks),
      )
    : first
}

type ShardAttributes = { dim: number; blocks: readonly number[] }
type LocalSliceAttributes = { dim: number; starts: readonly number[]; ends: readonly number[] }

/**
 * A rank's own slice of a replicated value, for `rowwise_split_input`. The tracer inserts it; as a rank executes it,
 * its attributes are the index ranges `starts`/`ends` along `dim`, to be joined.
 */
defineOp<ShardAttributes>({
  name: 'shard',
  movesOnly: true,
  infer: ([x]) => [x as TensorType],
  place(context) {
    const { dim, blocks } = context.attributes
    if (context.complete(0).kind === 'shard') {
      context.illegal('PLACEMENT_SHARD', 'a value is sliced once', 'take the value as it is')
    }
    return [shard(dim, blocks)]
  },
  localize({ dim, blocks }, { rank, tpDegree }): LocalSliceAttributes & Attributes {
    const offsets = blocks.map((_, i) => blocks.slice(0, i).reduce((sum, size) => sum + size, 0))
    const part = (i: number) => (blocks[i] as number) / tpDegree
    return {
      dim,
      starts: offsets.map((offset, i) => offset + rank * part(i)),
      ends: offsets.map((offset, i) => offset + (rank + 1) * part(i)),
    }
  },
  cost: free,
})

/** Sums partial values over all ranks, packed into one exchange. The tracer inserts it between segments. */
defineOp({
  name: 'all_reduce',
  infer: (inputs) => inputs,
  place(context) {
    if (context.inputs.some((input) => input.placement.kind !== 'partial')) {
      context.illegal('PLACEMENT_ALL_REDUCE', 'only partial values are summed', 'take the value as it is')
    }
    return context.inputs.map(() => REPLICATED)
  },
  cost: (inputs) => ({ flops: inputs.reduce((sum, input) => sum + sizeOf(input.shape), 0) }),
})
