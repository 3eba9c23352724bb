import { RankwiseError, type Shape, Tensor } from '../src/index.ts'
import { type Placement, shardSlices } from '../src/placement.ts'
import { type Float64Tensor, shardTensor } from '../src/reference/index.ts'
import { sizeOf } from '../src/tensor.ts'

/** Uniform numbers in [0, 1) from a seed (mulberry32), so that failures repeat. */
export function random(seed: number): () => number {
  let state = seed | 0
  return () => {
    state = (state + 0x6d2b79f5) | 0
    let t = Math.imul(state ^ (state >>> 15), 1 | state)
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32
  }
}

export function randomTensor(shape: Shape, seed: number, scale = 1): Float64Tensor {
  const next = random(seed)
  return new Tensor(
    'float64',
    shape,
    Float64Array.from({ length: sizeOf(shape) }, () => (2 * next() - 1) * scale),
  )
}

export function float64(shape: Shape, data: readonly number[]): Float64Tensor {
  return new Tensor('float64', shape, Float64Array.from(data))
}

/** What every rank holds of a whole tensor; summands of a partial one are random. */
export function partsOf(whole: Float64Tensor, placement: Placement, tpDegree: number, seed: number): Float64Tensor[] {
  if (placement.kind !== 'partial') {
    return Array.from({ length: tpDegree }, (_, rank) => shardTensor(whole, placement, rank, tpDegree).clone())
  }
  const others = Array.from({ length: tpDegree - 1 }, (_, i) => randomTensor(whole.shape, seed + i))
  const rest = whole.clone()
  for (const { data } of others)
    for (const [i, value] of data.entries()) rest.data[i] = (rest.data[i] as number) - value
  return [rest, ...others]
}

/**
 * The whole tensor that the ranks' parts stand for; replicated parts must be equal bit by bit.
 */
export function wholeOf(parts: readonly Float64Tensor[], placement: Placement, shape: Shape): Float64Tensor {
  const [first] = parts as [Float64Tensor]
  if (placement.kind === 'partial') return sumOf(parts)
  if (placement.kind === 'replicated') {
    for (const part of parts) requireEqual(part, first)
    return first
  }
  const whole = Tensor.zeros('float64', shape)
  const inner = sizeOf(shape.slice(placement.dim + 1))
  const row = (shape[placement.dim] as number) * inner
  for (const [rank, part] of parts.entries()) {
    const ranges = shardSlices(placement, rank, parts.length)?.ranges ?? [[0, shape[placement.dim] as number]]
    let from = 0
    for (let outer = 0; outer < sizeOf(shape.slice(0, placement.dim)); outer++) {
      for (const [start, end] of ranges) {
        const length = (end - start) * inner
        whole.data.set(part.data.subarray(from, from + length), outer * row + start * inner)
        from += length
      }
    }
    if (from !== part.data.length) throw new Error(`rank ${rank} holds ${part.data.length} elements instead of ${from}`)
  }
  return whole
}

export function sumOf(parts: readonly Float64Tensor[]): Float64Tensor {
  const sum = Tensor.zeros('float64', (parts[0] as Float64Tensor).shape)
  for (const { data } of parts) for (const [i, value] of data.entries()) sum.data[i] = (sum.data[i] as number) + value
  return sum
}

export function requireEqual(actual: Tensor, expected: Tensor): void {
  const at = actual.data.findIndex((value, i) => !Object.is(value, expected.data[i]))
  if (at >= 0) throw new Error(`element ${at} is ${actual.data[at]} on one rank and ${expected.data[at]} on another`)
}

/** Largest |actual - expected| / (1 + |expected|); Infinity where shapes differ or a NaN has no equal. */
export function distance(actual: Tensor, expected: Tensor): number {
  if (actual.shape.join() !== expected.shape.join()) return Number.POSITIVE_INFINITY
  let largest = 0
  for (const [i, value] of expected.data.entries()) {
    const [a, e] = [Number(actual.data[i]), Number(value)]
    if (Object.is(a, e)) continue
    const difference = Math.abs(a - e) / (1 + Math.abs(e))
    largest = Math.max(largest, Number.isNaN(difference) ? Number.POSITIVE_INFINITY : difference)
  }
  return largest
}

/** The RankwiseError that `body` throws. */
export function refusalOf(body: () => unknown): RankwiseError {
  try {
    body()
  } catch (error) {
    if (error instanceof RankwiseError) return error
    throw error
  }
  throw new Error('nothing was thrown')
}

/** The code of the RankwiseError that `body` throws; undefined when it throws nothing. */
export function codeOf(body: () => unknown): string | undefined {
  try {
    body()
  } catch (error) {
    if (error instanceof RankwiseError) return error.code
    throw error
  }
  return undefined
}
