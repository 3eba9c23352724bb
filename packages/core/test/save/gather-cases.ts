import fc from 'fast-check'
import type { DType } from '../../src/dtype.ts'
import { type Placement, REPLICATED, type ShardSlices, shard, shardSlices } from '../../src/placement.ts'
import type { Shape } from '../../src/tensor.ts'
import { FORMAT_NAMES, slicedBytes } from '../checkpoint/slices.ts'

/** A tensor that is saved at one degree and read in parts of another. */
export interface GatherCase {
  readonly dtype: DType
  readonly shape: Shape
  readonly placement: Placement
  readonly savedDegree: number
  /** `undefined` is all of it. */
  readonly wanted: readonly (ShardSlices | undefined)[]
}

const dtype = fc.constantFrom(...(Object.keys(FORMAT_NAMES) as DType[]))

/** Blocks that two degrees divide, read by every rank of the other one. */
const degreesCase = fc
  .record({
    dtype,
    others: fc.array(fc.integer({ min: 1, max: 5 }), { maxLength: 3 }),
    units: fc.array(fc.integer({ min: 1, max: 3 }), { minLength: 1, maxLength: 5 }),
    savedDegree: fc.constantFrom(1, 2, 3, 4, 8),
    degree: fc.constantFrom(1, 2, 3, 4, 6, 8),
    dim: fc.nat(),
  })
  .map(({ dtype, others, units, savedDegree, degree, dim }): GatherCase => {
    const blocks = units.map((unit) => (unit * savedDegree * degree) / commonDivisor(savedDegree, degree))
    const sharded = dim % (others.length + 1)
    const shape = [...others.slice(0, sharded), sum(blocks), ...others.slice(sharded)]
    const placement = shard(sharded, blocks)
    const wanted = Array.from({ length: degree }, (_, rank) => shardSlices(placement, rank, degree))
    return { dtype, shape, placement, savedDegree, wanted }
  })

/** Any ranges of any dimension: a plan may split another one than it did at the time of the save. */
const rangesCase = fc
  .record({
    dtype,
    units: fc.array(fc.integer({ min: 0, max: 3 }), { minLength: 1, maxLength: 4 }),
    savedDegree: fc.constantFrom(1, 2, 3),
    savedDim: fc.nat(),
    wantedDim: fc.nat(),
    bounds: fc.array(fc.double({ min: 0, max: 1, noNaN: true }), { maxLength: 8 }),
  })
  .map(({ dtype, units, savedDegree, savedDim, wantedDim, bounds }): GatherCase => {
    const shape = units.map((unit) => unit * savedDegree)
    const [saved, dim] = [savedDim % shape.length, wantedDim % shape.length]
    const indices = bounds.map((bound) => Math.round(bound * (shape[dim] as number))).sort((a, b) => a - b)
    const ranges: [number, number][] = []
    for (let i = 0; i + 1 < indices.length; i += 2) ranges.push([indices[i] as number, indices[i + 1] as number])
    const size = shape[saved] as number
    const placement = size === 0 ? REPLICATED : shard(saved, [size])
    return { dtype, shape, placement, savedDegree, wanted: [{ dim, ranges }, undefined] }
  })

/** Heads of which ranks share some, at the time of the save or of the load. */
const headsCase = fc
  .record({
    dtype,
    heads: fc.constantFrom(1, 2, 4),
    headDim: fc.constantFrom(1, 3),
    savedDegree: fc.constantFrom(1, 2, 4, 8),
    degree: fc.constantFrom(1, 2, 4, 8),
    dim: fc.constantFrom(0, 1),
  })
  .map(({ dtype, heads, headDim, savedDegree, degree, dim }): GatherCase => {
    const size = heads * headDim
    const placement = shard(dim, [size], heads)
    const wanted = Array.from({ length: degree }, (_, rank) => shardSlices(placement, rank, degree))
    return { dtype, shape: dim === 0 ? [size, 2] : [2, size], placement, savedDegree, wanted }
  })

export const gatherCase: fc.Arbitrary<GatherCase> = fc.oneof(degreesCase, rangesCase, headsCase)

/** The bytes of a part of the tensor. */
export function partBytes(
  bytes: Uint8Array,
  { dtype, shape }: GatherCase,
  slices: ShardSlices | undefined,
): Uint8Array {
  if (slices === undefined) return bytes
  return slicedBytes(bytes, { dtype, shape, slices, bytesBefore: 0 })
}

/** The shape of a part of the tensor. */
export function partShape({ shape }: GatherCase, slices: ShardSlices | undefined): Shape {
  if (slices === undefined) return shape
  return shape.with(slices.dim, sum(slices.ranges.map(([start, end]) => end - start)))
}

function sum(sizes: readonly number[]): number {
  return sizes.reduce((total, size) => total + size, 0)
}

function commonDivisor(a: number, b: number): number {
  return b === 0 ? a : commonDivisor(b, a % b)
}
