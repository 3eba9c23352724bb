import { type DType, RankwiseError, type ReduceOp, sizeOf, type Tensor } from '@rankwise/core'
import { REDUCIBLE_DTYPES } from './nccl-types.ts'

const KINDS = ['allReduce', 'allGather', 'reduceScatter', 'broadcast', 'barrier'] as const
const REDUCE_OPS: readonly ReduceOp[] = ['sum', 'max', 'min']
const DTYPES: readonly DType[] = [
  'float64',
  'float32',
  'float16',
  'bfloat16',
  'int64',
  'int32',
  'int16',
  'int8',
  'uint8',
  'bool',
]

type OperationKind = (typeof KINDS)[number]

/** Number of 32-bit words of an encoded operation. */
export const OPERATION_WORDS = 8

/** One call of a collective, as this rank made it; ranks compare theirs before any data moves. */
export interface Operation {
  /** Counts the calls on this rank from 1. */
  readonly sequence: number
  readonly kind: OperationKind
  readonly reduceOp?: ReduceOp | undefined
  /** Rank that a broadcast starts from. */
  readonly source?: number | undefined
  readonly tensors: readonly Contents[]
  /** Whether the tensors lie on the GPU: host tensors travel in other pieces, so the two do not match. */
  readonly onDevice?: boolean
}

/** What an operation tells of a tensor. */
export type Contents = Pick<Tensor, 'dtype' | 'shape' | 'byteLength'>

/** The part of an operation that all ranks must agree on. */
interface Fingerprint {
  readonly sequence: number
  readonly kind: OperationKind
  readonly onDevice: boolean
  /** Reduction of a reducing operation, source of a broadcast, otherwise empty. */
  readonly detail: string
  /** The dtype of all tensors; undefined when they differ or there are none. */
  readonly dtype: DType | undefined
  readonly tensors: number
  readonly bytes: number
  /** Hash of all dtypes and shapes. */
  readonly layout: number
}

/** Writes what peers compare: two operations match when all {@link OPERATION_WORDS} words are equal. */
export function encodeOperation(operation: Operation, words: Int32Array): void {
  const { sequence, kind, reduceOp, source, tensors, onDevice = false } = operation
  const bytes = tensors.reduce((sum, tensor) => sum + tensor.byteLength, 0)
  words[0] = sequence
  words[1] = KINDS.indexOf(kind) + (onDevice ? KINDS.length : 0)
  words[2] = reduceOp === undefined ? (source ?? -1) : REDUCE_OPS.indexOf(reduceOp)
  words[3] = commonDtype(tensors)
  words[4] = tensors.length
  words[5] = bytes
  words[6] = bytes / 2 ** 32
  words[7] = layoutHash(tensors)
}

/** How an operation reads in a message: `allReduce #12 (sum, 2 x float32, 4096 bytes, layout 1f00aa42)`. */
export function describeOperation(operation: Operation): string {
  const words = new Int32Array(OPERATION_WORDS)
  encodeOperation(operation, words)
  return describeEncoded(words)
}

/** As {@link describeOperation}, of an encoded operation. */
export function describeEncoded(words: Int32Array): string {
  const { sequence, kind, onDevice, detail, dtype, tensors, bytes, layout } = decode(words)
  const details = [detail, onDevice ? 'on the device' : '']
  if (tensors > 0) {
    details.push(`${tensors} x ${dtype ?? 'mixed dtypes'}`, `${bytes} bytes`, `layout ${layout.toString(16)}`)
  }
  const text = details.filter((part) => part !== '').join(', ')
  return text === '' ? `${kind} #${sequence}` : `${kind} #${sequence} (${text})`
}

function decode(words: Int32Array): Fingerprint {
  const [sequence, kindIndex, detail, dtype, tensors, low, high, layout] = [...words] as EncodedOperation
  const kind = KINDS[kindIndex % KINDS.length] as OperationKind
  return {
    sequence,
    kind,
    onDevice: kindIndex >= KINDS.length,
    detail: describeDetail(kind, detail),
    dtype: DTYPES[dtype],
    tensors,
    bytes: high * 2 ** 32 + (low >>> 0),
    layout: layout >>> 0,
  }
}

type EncodedOperation = [number, number, number, number, number, number, number, number]

function describeDetail(kind: OperationKind, detail: number): string {
  if (kind === 'broadcast') return `from rank ${detail}`
  return kind === 'allReduce' || kind === 'reduceScatter' ? (REDUCE_OPS[detail] as string) : ''
}

function commonDtype(tensors: readonly Contents[]): number {
  const [first] = tensors
  return first !== undefined && tensors.every(({ dtype }) => dtype === first.dtype) ? DTYPES.indexOf(first.dtype) : -1
}

/** FNV-1a over the dtype and the shape of every tensor. */
function layoutHash(tensors: readonly Contents[]): number {
  let hash = 0x811c9dc5
  const add = (value: number) => {
    hash = Math.imul(hash ^ value, 0x01000193)
  }
  for (const { dtype, shape } of tensors) {
    add(DTYPES.indexOf(dtype))
    add(shape.length)
    for (const size of shape) add(size)
  }
  return hash
}

/**
 * Refuses arguments that no rank could run.
 *
 * @throws RankwiseError `COLLECTIVE_DTYPE`, `COLLECTIVE_SHAPE`, `COLLECTIVE_OP`, `COLLECTIVE_SOURCE`.
 */
export function requireValid(operation: Operation, worldSize: number): void {
  const { kind, reduceOp, source, tensors } = operation
  if (reduceOp !== undefined) requireReducible(operation, reduceOp)
  if (kind === 'allGather' || kind === 'reduceScatter') {
    for (const tensor of tensors) requireRows(operation, tensor, kind === 'reduceScatter' ? worldSize : 1)
  }
  if (source !== undefined && !(Number.isInteger(source) && source >= 0 && source < worldSize)) {
    throw new RankwiseError('COLLECTIVE_SOURCE', 'the source is not a rank', {
      where: where(operation),
      actual: { source, worldSize },
      rule: 'source is an integer from 0 to worldSize - 1',
    })
  }
}

function requireReducible(operation: Operation, reduceOp: ReduceOp): void {
  if (!REDUCE_OPS.includes(reduceOp)) {
    throw new RankwiseError('COLLECTIVE_OP', 'the reduction is unknown', {
      where: where(operation),
      actual: { op: reduceOp },
      rule: `op is one of ${REDUCE_OPS.join(', ')}`,
    })
  }
  for (const [index, { dtype }] of operation.tensors.entries()) {
    if (REDUCIBLE_DTYPES.includes(dtype)) continue
    throw new RankwiseError('COLLECTIVE_DTYPE', 'tensors of this dtype cannot be reduced', {
      where: where(operation),
      actual: { tensor: index, dtype },
      rule: `dtype is one of ${REDUCIBLE_DTYPES.join(', ')}`,
      remedy: 'cast the tensor first',
    })
  }
}

function requireRows(operation: Operation, { shape }: Contents, divisor: number): void {
  const [rows] = shape
  if (rows !== undefined && rows % divisor === 0) return
  throw new RankwiseError('COLLECTIVE_SHAPE', 'dim 0 cannot be shared between the ranks', {
    where: where(operation),
    actual: { shape, elements: sizeOf(shape), ...(divisor > 1 ? { worldSize: divisor } : {}) },
    rule: divisor > 1 ? 'dim 0 is divisible by worldSize' : 'the tensor has at least one dimension',
  })
}

/** Names the call; the rest of an invalid operation cannot be described. */
function where({ kind, sequence }: Operation): string {
  return `${kind} #${sequence}`
}
