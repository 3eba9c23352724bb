import type { DType } from '../src/dtype.ts'
import type { Attributes, TensorType } from '../src/graph.ts'
import { opDefinition, type PlacedType, PlacementContext } from '../src/op.ts'
import '../src/ops/index.ts'
import { localShape, PARTIAL, type Placement, REPLICATED, shard } from '../src/placement.ts'
import { type Float64Tensor, referenceOp, shardTensor } from '../src/reference/index.ts'
import type { Shape } from '../src/tensor.ts'
import { distance, float64, partsOf, randomTensor, sumOf, wholeOf } from './support.ts'

/** One operation at given shapes. */
export interface OpCall {
  readonly op: string
  readonly shapes: readonly Shape[]
  readonly attributes?: Attributes
  /** @default all 'float64' */
  readonly dtypes?: readonly DType[]
  /** Whether input 1 is a weight of the style rowwise_split_input. */
  readonly splitInput?: boolean
}

export interface Placed {
  readonly outputs: readonly Placement[]
  readonly sums: readonly number[]
  readonly splits: ReadonlyMap<number, Placement>
}

export function outputTypes({ op, shapes, dtypes, attributes = {} }: OpCall): readonly TensorType[] {
  const inputs = shapes.map((shape, i): TensorType => ({ shape, dtype: dtypes?.[i] ?? 'float64' }))
  return opDefinition(op).infer(inputs, attributes)
}

function placedInputs({ shapes, dtypes, splitInput = false }: OpCall, placements: readonly Placement[]): PlacedType[] {
  return shapes.map((shape, i) => ({
    shape,
    dtype: dtypes?.[i] ?? 'float64',
    placement: placements[i] as Placement,
    label: `operand${i}`,
    splitInput: splitInput && i === 1,
  }))
}

/** What the placement rule says. */
export function placeOp(call: OpCall, placements: readonly Placement[], tpDegree: number, path = 'a.path'): Placed {
  const { op, attributes = {} } = call
  const inputs = placedInputs(call, placements)
  const context = new PlacementContext(op, path, attributes, inputs, outputTypes(call), tpDegree)
  const outputs = opDefinition(op).place(context)
  return { outputs, sums: [...context.reductions].sort(), splits: context.splits }
}

/** Operands that suit the operation: ids are entries of a table of 8, divisors are far from 0. */
function operands({ op, shapes, dtypes }: OpCall, seed: number): Float64Tensor[] {
  return shapes.map((shape, i) => {
    const tensor = randomTensor(shape, seed + 100 * i)
    if (dtypes?.[i] === 'int32')
      return float64(
        shape,
        Array.from(tensor.data, (value) => Math.floor((value + 1) * 4)),
      )
    if (op === 'div' && i === 1)
      return float64(
        shape,
        Array.from(tensor.data, (value) => value + 3),
      )
    return tensor
  })
}

/**
 * How far apart the ranks' results, put together as `placed` says, are from the operation on whole operands; Infinity
 * when a rank computes another shape than the placement says.
 */
export function placementError(
  call: OpCall,
  placements: readonly Placement[],
  placed: Placed,
  tpDegree: number,
  seed = 1,
): number {
  const { op, attributes = {} } = call
  const wholes = operands(call, seed)
  const parts = wholes.map((whole, i) => partsOf(whole, placements[i] as Placement, tpDegree, seed + 1000 * (i + 1)))
  const types = outputTypes(call).map((type, i) => ({ ...type, placement: placed.outputs[i] as Placement, label: '' }))
  const results = Array.from({ length: tpDegree }, (_, rank) => {
    const local = parts.map((perRank, i) => {
      const own = placed.sums.includes(i) ? sumOf(perRank) : (perRank[rank] as Float64Tensor)
      const split = placed.splits.get(i)
      return split === undefined ? own : shardTensor(own, split, rank, tpDegree)
    })
    const context = { rank, tpDegree, inputs: placedInputs(call, placements), outputs: types }
    return referenceOp(op, local, opDefinition(op).localize?.(attributes, context) ?? attributes)
  })
  const expected = referenceOp(op, wholes, attributes)
  const distances = types.map(({ shape, placement }, i) => {
    const perRank = results.map((outputs) => outputs[i] as Float64Tensor)
    if (perRank.some((part) => part.shape.join() !== localShape(shape, placement, tpDegree).join())) return Infinity
    return distance(wholeOf(perRank, placement, shape), expected[i] as Float64Tensor)
  })
  return Math.max(...distances)
}

/**
 * A placement in short: `R`, `P`, `S1` (one block), `S1*` (a quarter and three quarters of dimension 1) or
 * `S1[16|8]`.
 */
export function placementFrom(text: string, shape: Shape): Placement {
  if (text === 'R') return REPLICATED
  if (text === 'P') return PARTIAL
  const [, digit = '', star, list] = /^S(\d)(\*)?(?:\[(.*)\])?$/.exec(text) ?? []
  const dim = Number(digit)
  const size = shape[dim] as number
  if (list !== undefined) return shard(dim, list.split('|').map(Number))
  return shard(dim, star === undefined ? [size] : [size / 4, (size * 3) / 4])
}

/** Every placement of a shape at degree 2, in short. */
export function placementsAtTwo(shape: Shape): string[] {
  const shards = shape.flatMap((size, dim) => {
    if (size % 2 !== 0) return []
    return size % 8 === 0 ? [`S${dim}`, `S${dim}*`] : [`S${dim}`]
  })
  return ['R', 'P', ...shards]
}

/** All ways to pick one element of each list. */
export function combinations<T>(lists: readonly (readonly T[])[]): T[][] {
  return lists.reduce<T[][]>((rows, list) => rows.flatMap((row) => list.map((item) => [...row, item])), [[]])
}
