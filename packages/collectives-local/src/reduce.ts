import { type DType, type DTypeArrays, float16ToFloat32, float32ToFloat16, type ReduceOp } from '@rankwise/core'

/**
 * Where the contributions of the ranks lie and where the result goes; all figures in elements. The contribution of
 * rank r starts at `first + r * stride` of `source`. `target` may be `source` itself if the result covers the
 * contribution of rank 0.
 */
export interface Reduction<A> {
  readonly source: A
  readonly first: number
  readonly stride: number
  readonly ranks: number
  readonly target: A
  readonly targetStart: number
  readonly count: number
}

type NumberArray = Float32Array | Float64Array | Int32Array
type Halves = Uint16Array

/**
 * Elements that are reduced before the next ones are touched: with eight ranks of float64, 256 KiB, which stays in a
 * second-level cache.
 */
const BLOCK = 4096

/**
 * Combines the contributions of all ranks in rank order: ((r0 + r1) + r2) + ..., each step rounded to the dtype, so
 * whoever computes it gets the same bits. 16-bit floats are combined as float32 and rounded once. int32 sums wrap.
 * A NaN of any rank makes the result NaN.
 */
export function reduce(dtype: DType, op: ReduceOp, reduction: Reduction<DTypeArrays[DType]>): void {
  if (dtype === 'bfloat16') reduceHalves(BFLOAT16, op, reduction as Reduction<Halves>)
  else if (dtype === 'float16') reduceHalves(FLOAT16, op, reduction as Reduction<Halves>)
  else reduceNumbers(op, reduction as Reduction<NumberArray>)
}

function reduceNumbers(op: ReduceOp, reduction: Reduction<NumberArray>): void {
  const { source, first, stride, ranks, target, targetStart, count } = reduction
  const combine = COMBINE[op]
  for (let start = 0; start < count; start += BLOCK) {
    const size = Math.min(BLOCK, count - start)
    const out = targetStart + start
    combine(target, out, source, first + start, source, first + stride + start, size)
    for (let rank = 2; rank < ranks; rank++) {
      combine(target, out, target, out, source, first + rank * stride + start, size)
    }
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
const COMBINE: Record<ReduceOp, Combine> = {
  sum(target, t, a, ai, b, bi, size) {
    for (let i = 0; i < size; i++) target[t + i] = (a[ai + i] as number) + (b[bi + i] as number)
  },
  max(target, t, a, ai, b, bi, size) {
    for (let i = 0; i < size; i++) target[t + i] = Math.max(a[ai + i] as number, b[bi + i] as number)
  },
  min(target, t, a, ai, b, bi, size) {
    for (let i = 0; i < size; i++) target[t + i] = Math.min(a[ai + i] as number, b[bi + i] as number)
  },
}

/** One block per rank, widened to float32; `bits` is the same memory. */
interface Scratch {
  readonly floats: Float32Array
  readonly bits: Uint32Array
}

/** Widens and narrows 16-bit floats. */
interface HalfCodec {
  decode(halves: Halves, start: number, scratch: Scratch, at: number, size: number): void
  encode(scratch: Scratch, halves: Halves, start: number, size: number): void
}

let sharedScratch: Scratch = newScratch(0)

function newScratch(length: number): Scratch {
  const floats = new Float32Array(length)
  return { floats, bits: new Uint32Array(floats.buffer) }
}

function scratchFor(ranks: number): Scratch {
  if (sharedScratch.floats.length < ranks * BLOCK) sharedScratch = newScratch(ranks * BLOCK)
  return sharedScratch
}

function reduceHalves(codec: HalfCodec, op: ReduceOp, reduction: Reduction<Halves>): void {
  const { source, first, stride, ranks, target, targetStart, count } = reduction
  const scratch = scratchFor(ranks)
  const { floats } = scratch
  for (let start = 0; start < count; start += BLOCK) {
    const size = Math.min(BLOCK, count - start)
    for (let rank = 0; rank < ranks; rank++) {
      codec.decode(source, first + rank * stride + start, scratch, rank * BLOCK, size)
    }
    reduceNumbers(op, { source: floats, first: 0, stride: BLOCK, ranks, target: floats, targetStart: 0, count: size })
    codec.encode(scratch, target, targetStart + start, size)
  }
}

/** The same rounding as `float32ToBfloat16` of core, without a call per element. */
const BFLOAT16: HalfCodec = {
  decode(halves, start, { bits }, at, size) {
    for (let i = 0; i < size; i++) bits[at + i] = (halves[start + i] as number) << 16
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
  decode(halves, start, { floats }, at, size) {
    const table = float16Table()
    for (let i = 0; i < size; i++) floats[at + i] = table[halves[start + i] as number] as number
  },
  encode({ floats }, halves, start, size) {
    for (let i = 0; i < size; i++) halves[start + i] = float32ToFloat16(floats[i] as number)
  },
}

let float16Values: Float32Array | undefined

/** The value of every float16, 256 KiB; built on first use. */
function float16Table(): Float32Array {
  float16Values ??= Float32Array.from({ length: 2 ** 16 }, (_, bits) => float16ToFloat32(bits))
  return float16Values
}
