import { DTYPES, type DType, isFloatingPoint, itemSize } from '../dtype.ts'
import type { TensorType } from '../graph.ts'
import { defineOp, type PlacementContext, shapeError } from '../op.ts'
import { PARTIAL, type Placement, REPLICATED, sameBlocks, shard } from '../placement.ts'
import { type Shape, sizeOf } from '../tensor.ts'

/** The shape of an elementwise result under NumPy broadcasting. */
function broadcastShape(op: string, a: TensorType, b: TensorType): Shape {
  const rank = Math.max(a.shape.length, b.shape.length)
  return Array.from({ length: rank }, (_, dim) => {
    const sizeA = a.shape[dim - rank + a.shape.length] ?? 1
    const sizeB = b.shape[dim - rank + b.shape.length] ?? 1
    if (sizeA !== sizeB && sizeA !== 1 && sizeB !== 1) {
      throw shapeError(op, [a, b], 'aligned from the right, sizes are equal or 1')
    }
    return Math.max(sizeA, sizeB) === 0 || sizeA === 0 || sizeB === 0 ? 0 : Math.max(sizeA, sizeB)
  })
}

/**
 * Placement of an elementwise result whose operands are complete. A sharded operand meets either an operand sharded
 * alike, or one that is broadcast along the sharded dimension and so is the same for every rank.
 */
function placeBroadcast(context: PlacementContext, placements: readonly Placement[]): Placement {
  const rank = context.outputs[0]?.shape.length ?? 0
  const aligned = placements.map((placement, i) => {
    if (placement.kind !== 'shard') return undefined
    return shard(placement.dim + rank - context.input(i).shape.length, placement.blocks, placement.heads)
  })
  const sharded = aligned.find((placement) => placement !== undefined)
  if (sharded === undefined) return REPLICATED
  for (const [i, placement] of aligned.entries()) {
    const { shape } = context.input(i)
    const alike = placement?.dim === sharded.dim && sameBlocks(placement, sharded)
    const broadcast = placement === undefined && (shape[sharded.dim - rank + shape.length] ?? 1) === 1
    if (!alike && !broadcast) {
      context.illegal(
        'PLACEMENT_ELEMENTWISE',
        'operands are sharded alike, or the other one is broadcast along the sharded dimension',
        'give both producers the same style, or complete the sharded one with a rowwise projection',
      )
    }
  }
  return sharded
}

/**
 * Whether summands are added up before anything is done to them, as in torch. What is in 16 bits loses bits to every
 * operation, and summands are larger than their sum; where they stay summands, nothing is saved but the order of exchanges.
 */
function isSummedFirst({ outputs }: PlacementContext): boolean {
  return itemSize(outputs[0]?.dtype ?? 'float32') === 2
}

function defineBinary(name: string, placePartial: (a: Placement, b: Placement) => Placement | undefined): void {
  defineOp({
    name,
    infer([a, b]) {
      const [x, y] = [a as TensorType, b as TensorType]
      if (x.dtype !== y.dtype) throw shapeError(name, [x, y], 'operands have the same dtype')
      return [{ dtype: x.dtype, shape: broadcastShape(name, x, y) }]
    },
    place(context) {
      const partial = isSummedFirst(context) ? undefined : placePartial(context.placement(0), context.placement(1))
      if (partial !== undefined) return [partial]
      return [placeBroadcast(context, [context.complete(0), context.complete(1)])]
    },
    cost: (_inputs, [output]) => ({ flops: sizeOf((output as TensorType).shape) }),
  })
}

const bothPartial = (a: Placement, b: Placement) => (a.kind === 'partial' && b.kind === 'partial' ? PARTIAL : undefined)
const scaledPartial = (a: Placement, b: Placement) =>
  a.kind === 'partial' && b.kind === 'replicated' ? PARTIAL : undefined

defineBinary('add', bothPartial)
defineBinary('sub', bothPartial)
defineBinary('mul', (a, b) => scaledPartial(a, b) ?? scaledPartial(b, a))
defineBinary('div', scaledPartial)

function defineUnary(name: string, flopsPerElement: number, linear: boolean): void {
  defineOp({
    name,
    infer: ([x]) => [x as TensorType],
    place: (context) => [linear && !isSummedFirst(context) ? context.placement(0) : context.complete(0)],
    cost: (_inputs, [output]) => ({ flops: flopsPerElement * sizeOf((output as TensorType).shape) }),
  })
}

// Scaling by a number keeps a sum a sum; adding a number to every summand would add it once per rank.
defineUnary('mul_scalar', 1, true)
defineUnary('add_scalar', 1, false)
// Costs of transcendental functions follow the usual convention of counting about 4 operations each.
defineUnary('silu', 6, false)
defineUnary('sin', 4, false)
defineUnary('cos', 4, false)

type CastAttributes = { dtype: DType }

/** The same values in another floating-point dtype, rounded to nearest even: not linear, as rounded parts do not sum up. */
defineOp<CastAttributes>({
  name: 'cast',
  infer([x], { dtype }) {
    const input = x as TensorType
    if (!isFloatingPoint(input.dtype) || !DTYPES.includes(dtype) || !isFloatingPoint(dtype)) {
      throw shapeError('cast', [input], `from one floating-point dtype to another, not to ${dtype}`)
    }
    return [{ dtype, shape: input.shape }]
  },
  place: (context) => [context.complete(0)],
  cost: () => ({ flops: 0 }),
})
