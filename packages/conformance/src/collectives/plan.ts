import { DTYPES, type DType, itemSize, type ReduceOp, type Shape, sizeOf, Tensor, viewAs } from '@rankwise/core'
import { REDUCIBLE, reduceInOrder } from './oracle.ts'

/** One operation, without its data, which differs from rank to rank. */
export interface Plan {
  readonly kind: 'allReduce' | 'allGather' | 'reduceScatter' | 'broadcast'
  readonly types: readonly { readonly dtype: DType; readonly shape: Shape }[]
  readonly op: ReduceOp
  readonly source: number
  readonly seed: number
}

const OPS: readonly ReduceOp[] = ['sum', 'max', 'min']
const SIZES = [0, 1, 2, 3, 7, 64, 255, 1500]

/**
 * Every kind with every dtype that it takes, at sizes from 0 to 1500, and one of 1.2 MB; the same every time.
 */
export function plansFor(worldSize: number): readonly Plan[] {
  const next = xorshift(worldSize)
  const pick = <T>(values: readonly T[]) => values[(next() >>> 0) % values.length] as T
  const rows = () => [pick([0, 1, 2, 3, 5]), pick([1, 3, 64, 299])]
  const plan = (kind: Plan['kind'], types: Plan['types'], op: ReduceOp = 'sum'): Plan => {
    return { kind, types, op, source: pick([0, worldSize - 1]), seed: next() & 0xffff }
  }
  const reduces = REDUCIBLE.flatMap((dtype) =>
    OPS.flatMap((op) => [
      plan('allReduce', [{ dtype, shape: [pick(SIZES)] }], op),
      plan('reduceScatter', [{ dtype, shape: [worldSize * pick([0, 1, 3]), pick([1, 5, 300])] }], op),
    ]),
  )
  const packed = Array.from({ length: 10 }, () => {
    const types = Array.from({ length: pick([0, 1, 2, 5]) }, () => ({ dtype: pick(REDUCIBLE), shape: [pick(SIZES)] }))
    return plan('allReduce', types, pick(OPS))
  })
  const moves = DTYPES.flatMap((dtype) => [
    plan('allGather', [{ dtype, shape: rows() }]),
    plan('broadcast', [{ dtype, shape: rows() }]),
  ])
  return [...reduces, ...packed, ...moves, plan('allReduce', [{ dtype: 'float32', shape: [300_001] }])]
}

/** What `rank` brings to an operation. */
export function tensorsOf({ types, seed }: Plan, rank: number): readonly Tensor[] {
  return types.map(({ dtype, shape }, i) => {
    return new Tensor(dtype, shape, viewAs(dtype, randomBytes(dtype, sizeOf(shape), seed + 1000 * rank + i)))
  })
}

/** What `rank` has to hold afterwards. */
export function expectedOn(plan: Plan, rank: number, worldSize: number): readonly Uint8Array[] {
  const { kind, op, source, types } = plan
  const inputs = Array.from({ length: worldSize }, (_, r) => tensorsOf(plan, r).map(bytesOf))
  return types.map(({ dtype }, i) => {
    const parts = inputs.map((tensors) => tensors[i] as Uint8Array)
    if (kind === 'allGather') return new Uint8Array(Buffer.concat(parts))
    if (kind === 'broadcast') return parts[source] as Uint8Array
    const reduced = reduceInOrder(dtype, op, parts)
    if (kind === 'allReduce') return reduced
    const share = reduced.length / worldSize
    return reduced.subarray(rank * share, (rank + 1) * share)
  })
}

/** The bytes of a tensor; a view. */
export function bytesOf({ data }: Tensor): Uint8Array {
  return new Uint8Array(data.buffer, data.byteOffset, data.byteLength)
}

/** Small and large, exact and inexact, with every special value now and then; the same for the same seed. */
function randomBytes(dtype: DType, elements: number, seed: number): Uint8Array {
  const next = xorshift(seed)
  const bytes = new Uint8Array(elements * itemSize(dtype))
  const array = viewAs(dtype, bytes)
  if (array instanceof Float32Array || array instanceof Float64Array) {
    for (let i = 0; i < elements; i++) array[i] = randomNumber(next)
  } else if (dtype === 'bool') {
    for (let i = 0; i < elements; i++) bytes[i] = next() & 1
  } else {
    for (let i = 0; i < bytes.length; i++) bytes[i] = next()
  }
  return bytes
}

const SPECIAL = [0, -0, 1, -1, Number.NaN, Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY, 1e-42, 3e38, 65504]

function randomNumber(next: () => number): number {
  if (next() % 16 === 0) return SPECIAL[(next() >>> 0) % SPECIAL.length] as number
  return (next() / 2 ** 31) * 2 ** (next() % 20)
}

function xorshift(seed: number): () => number {
  let state = Math.imul(seed + 1, 0x9e3779b1) | 1
  return () => {
    state ^= state << 13
    state ^= state >>> 17
    state ^= state << 5
    return state
  }
}
