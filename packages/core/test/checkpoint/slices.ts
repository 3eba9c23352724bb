import fc from 'fast-check'
import { type DType, itemSize } from '../../src/dtype.ts'
import type { ShardSlices } from '../../src/placement.ts'
import { shard, shardSlices } from '../../src/placement.ts'
import { type Shape, sizeOf } from '../../src/tensor.ts'

export const FORMAT_NAMES: Readonly<Record<DType, string>> = {
  float64: 'F64',
  float32: 'F32',
  float16: 'F16',
  bfloat16: 'BF16',
  int64: 'I64',
  int32: 'I32',
  int16: 'I16',
  int8: 'I8',
  uint8: 'U8',
  bool: 'BOOL',
}

/** A tensor that lies anywhere in a file, and a part of it. */
export interface SliceCase {
  readonly dtype: DType
  readonly shape: Shape
  readonly slices: ShardSlices
  /** Bytes of another tensor before it: any remainder modulo the element size. */
  readonly bytesBefore: number
}

/** Parts as tensor parallelism makes them: a rank's share of every block of a dimension. */
const rankCase = fc
  .record({
    dtype: fc.constantFrom(...(Object.keys(FORMAT_NAMES) as DType[])),
    shape: fc.array(fc.integer({ min: 1, max: 6 }), { minLength: 1, maxLength: 4 }),
    blocks: fc.array(fc.integer({ min: 1, max: 4 }), { minLength: 1, maxLength: 5 }),
    tpDegree: fc.constantFrom(2, 3, 4, 8),
    seed: fc.nat(),
    bytesBefore: fc.nat({ max: 17 }),
  })
  .map(({ shape, blocks, tpDegree, seed, ...rest }): SliceCase => {
    const dim = seed % shape.length
    const sizes = blocks.map((block) => block * tpDegree)
    const full = shape.with(
      dim,
      sizes.reduce((sum, size) => sum + size, 0),
    )
    const slices = shardSlices(shard(dim, sizes), seed % tpDegree, tpDegree)
    if (slices === undefined) throw new Error('a shard over several ranks has slices')
    return { ...rest, shape: full, slices }
  })

/** Any ascending ranges, empty ones and whole dimensions among them. */
const rangesCase = fc
  .record({
    dtype: fc.constantFrom(...(Object.keys(FORMAT_NAMES) as DType[])),
    shape: fc.array(fc.nat({ max: 7 }), { minLength: 1, maxLength: 4 }),
    bounds: fc.array(fc.double({ min: 0, max: 1, noNaN: true }), { maxLength: 8 }),
    dim: fc.nat(),
    bytesBefore: fc.nat({ max: 17 }),
  })
  .map(({ shape, bounds, dim, ...rest }): SliceCase => {
    const sliced = dim % shape.length
    const indices = bounds.map((bound) => Math.round(bound * (shape[sliced] as number))).sort((a, b) => a - b)
    const ranges: [number, number][] = []
    for (let i = 0; i + 1 < indices.length; i += 2) ranges.push([indices[i] as number, indices[i + 1] as number])
    return { ...rest, shape, slices: { dim: sliced, ranges } }
  })

export const sliceCase: fc.Arbitrary<SliceCase> = fc.oneof(rankCase, rangesCase)

/** The bytes of a part, element by element from the definition of row-major order. */
export function slicedBytes(bytes: Uint8Array, { dtype, shape, slices }: SliceCase): Uint8Array {
  const size = itemSize(dtype)
  const below = sizeOf(shape.slice(slices.dim + 1))
  const sliced = shape[slices.dim] as number
  const result: number[] = []
  for (let element = 0; element < sizeOf(shape); element++) {
    const index = Math.floor(element / below) % sliced
    const chosen = slices.ranges.some(([start, end]) => start <= index && index < end)
    if (chosen) result.push(...bytes.subarray(element * size, (element + 1) * size))
  }
  return Uint8Array.from(result)
}
