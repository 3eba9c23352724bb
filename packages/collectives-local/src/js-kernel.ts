import { type DType, float16ToFloat32, float32ToFloat16, type ReduceOp } from '@rankwise/core'
import type { Reduce } from './kernel.ts'

type NumberArray = Float32Array | Float64Array | Int32Array
type Halves = Uint16Array

/**
 * Elements that are reduced before the next ones are touched: with eight ranks of float64, 256 KiB, which stays in a
 * second-level cache.
 */
const BLOCK = 4096

/** The kernel that works everywhere. */
export const jsKernel: Reduce = (dtype, op, sources, target) => {
  if (dtype === 'bfloat16') reduceHalves(BFLOAT16, op, sources as Halves[], target as Halves)
  else if (dtype === 'float16') reduceHalves(FLOAT16, op, sources as Halves[], target as Halves)
  else reduceNumbers(dtype, op, sources as NumberArray[], target as NumberArray)
}

/** With more than two ranks the partial result is kept apart: the target may be a source that is still to be read. */
function reduceNumbers(dtype: DType, op: ReduceOp, sources: readonly NumberArray[], target: NumberArray): void {
  const combine = COMBINE[op]
  const last = sources.length - 1
  const partial = last > 1 ? partialFor(dtype) : target
  for (let start = 0; start < target.length; start += BLOCK) {
    const size = Math.min(BLOCK, target.length - start)
    let first = sources[0] as NumberArray
    let firstStart = start
    for (let rank = 1; rank < last; rank++) {
      combine(partial, 0, first, firstStart, sources[rank] as NumberArray, start, size)
      first = partial
      firstStart = 0
    }
    combine(target, start, first, firstStart, sources[last] as NumberArray, start, size)
  }
}

/** target[t + i] = a[ai + i] (op) b[bi + i] */
type Combine = (
  target: NumberArray,
  t: number,
  a: NumberArray,
  ai: number,
  b: NumberArray,
  bi: number,
  size: number,
) => void

// One loop per reduction: an operator passed as a function would cost a call per element once two have been used.
// `special` becomes NaN with the first infinity or NaN; asking each element would make a sum a third slower.
const COMBINE: Record<ReduceOp, Combine> = {
  sum(target, t, a, ai, b, bi, size) {
    let special = 0
    for (let i = 0; i < size; i++) {
      const sum = (a[ai + i] as number) + (b[bi + i] as number)
      target[t + i] = sum
      special += sum - sum
    }
    if (special !== 0) canonicalize(target, t, size)
  },
  max(target, t, a, ai, b, bi, size) {
    let special = 0
    for (let i = 0; i < size; i++) {
      const max = Math.max(a[ai + i] as number, b[bi + i] as number)
      target[t + i] = max
      special += max - max
    }
    if (special !== 0) canonicalize(target, t, size)
  },
  min(target, t, a, ai, b, bi, size) {
    let special = 0
    for (let i = 0; i < size; i++) {
      const min = Math.min(a[ai + i] as number, b[bi + i] as number)
      target[t + i] = min
      special += min - min
    }
    if (special !== 0) canonicalize(target, t, size)
  },
}

/** A sum may be any NaN (infinity - infinity has a sign on x64); Number.NaN has no sign and no payload, as in all kernels. */
function canonicalize(target: NumberArray, start: number, size: number): void {
  for (let i = start; i < start + size; i++) if (Number.isNaN(target[i])) target[i] = Number.NaN
}

const partials = new Map<DType, NumberArray>()

/** One block to keep partial results in. */
function partialFor(dtype: DType): NumberArray {
  let partial = partials.get(dtype)
  if (partial === undefined) {
    if (dtype === 'float64') partial = new Float64Array(BLOCK)
    else partial = dtype === 'int32' ? new Int32Array(BLOCK) : new Float32Array(BLOCK)
    partials.set(dtype, partial)
  }
  return partial
}

/** A block, widened to float32; `bits` is the same memory. */
interface Scratch {
  readonly floats: Float32Array
  readonly bits: Uint32Array
}

/** Widens and narrows 16-bit floats. */
interface HalfCodec {
  decode(halves: Halves, start: number, scratch: Scratch, size: number): void
  encode(scratch: Scratch, halves: Halves, start: number, size: number): void
}

function newScratch(): Scratch {
  const floats = new Float32Array(BLOCK)
  return { floats, bits: new Uint32Array(floats.buffer) }
}

let scratches: { readonly total: Scratch; readonly next: Scratch } | undefined

function reduceHalves(codec: HalfCodec, op: ReduceOp, sources: readonly Halves[], target: Halves): void {
  scratches ??= { total: newScratch(), next: newScratch() }
  const { total, next } = scratches
  const combine = COMBINE[op]
  for (let start = 0; start < target.length; start += BLOCK) {
    const size = Math.min(BLOCK, target.length - start)
    codec.decode(sources[0] as Halves, start, total, size)
    for (let rank = 1; rank < sources.length; rank++) {
      codec.decode(sources[rank] as Halves, start, next, size)
      combine(total.floats, 0, total.floats, 0, next.floats, 0, size)
    }
    codec.encode(total, target, start, size)
  }
}

/** The same rounding as `float32ToBfloat16` of core, without a call per element. */
const BFLOAT16: HalfCodec = {
  decode(halves, start, { bits }, size) {
    for (let i = 0; i < size; i++) bits[i] = (halves[start + i] as number) << 16
  },
  encode({ bits }, halves, start, size) {
    for (let i = 0; i < size; i++) {
      const word = bits[i] as number
      const nan = (word & 0x7fffffff) > 0x7f800000
      halves[start + i] = nan ? 0x7fc0 : (word + 0x7fff + ((word >>> 16) & 1)) >>> 16
    }
  },
}

const FLOAT16: HalfCodec = {
  decode(halves, start, { floats }, size) {
    const table = float16Table()
    for (let i = 0; i < size; i++) floats[i] = table[halves[start + i] as number] as number
  },
  encode({ floats }, halves, start, size) {
    for (let i = 0; i < size; i++) {
      const value = floats[i] as number
      halves[start + i] = Number.isNaN(value) ? 0x7e00 : float32ToFloat16(value)
    }
  },
}

let float16Values: Float32Array | undefined

/** The value of every float16, 256 KiB; built on first use. */
function float16Table(): Float32Array {
  float16Values ??= Float32Array.from({ length: 2 ** 16 }, (_, bits) => float16ToFloat32(bits))
  return float16Values
}
