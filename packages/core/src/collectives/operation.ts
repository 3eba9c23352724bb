import type { ReduceOp } from '../collectives.ts'
import type { DType } from '../dtype.ts'
import { RankwiseError } from '../errors.ts'
import { type Shape, sizeOf } from '../tensor.ts'

const KINDS = ['allReduce', 'allGather', 'reduceScatter', 'broadcast', 'barrier', 'allocate', 'newGroup'] as const
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

/** What collectives on the CPU can add and compare. */
const REDUCIBLE_DTYPES: readonly DType[] = ['float32', 'float64', 'float16', 'bfloat16', 'int32']

type OperationKind = (typeof KINDS)[number]

/** Number of 32-bit words of an encoded operation; the same number is in native/meeting.c. */
export const OPERATION_WORDS = 9

/** What ranks compare of a tensor. */
export interface TensorLayout {
  readonly dtype: DType
  readonly shape: Shape
  readonly byteLength: number
}

/** Where a tensor lies in memory that all ranks share. */
export interface SharedPlace {
  /** Counts the allocations of the group from 1. */
  readonly allocation: number
  /** From the start of the allocation, in bytes. */
  readonly offset: number
}

/** One call of a collective, as this rank made it; ranks compare theirs before any data moves. */
export interface Operation {
  /** Counts the calls on this rank from 1. */
  readonly sequence: number
  readonly kind: OperationKind
  readonly reduceOp?: ReduceOp | undefined
  /** Rank that a broadcast starts from. */
  readonly source?: number | undefined
  readonly tensors: readonly TensorLayout[]
  /** Where those tensors lie that are reduced in place, in the order of `tensors`. */
  readonly places?: readonly SharedPlace[] | undefined
  /** Ranks of the group that `newGroup` makes. */
  readonly members?: readonly number[] | undefined
  /** Whether the tensors lie on a GPU: those of the host travel in other pieces, so the two do not match. */
  readonly onDevice?: boolean | undefined
}

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
  /** Hash of all dtypes and shapes, or of the members of a new group. */
  readonly layout: number
  /** Hash of the places in shared memory; 0 when no tensor is reduced in place. */
  readonly places: number
}

/** Writes what peers compare: two operations match when all {@link OPERATION_WORDS} words are equal. */
export function encodeOperation(operation: Operation, words: Int32Array): void {
  const { sequence, kind, reduceOp, source, tensors, places, members, onDevice = false } = operation
  let bytes = 0
  for (const { byteLength } of tensors) bytes += byteLength
  words[0] = sequence
  words[1] = KINDS.indexOf(kind) + (onDevice ? KINDS.length : 0)
  words[2] = reduceOp === undefined ? (source ?? members?.length ?? -1) : REDUCE_OPS.indexOf(reduceOp)
  words[3] = commonDtype(tensors)
  words[4] = tensors.length
  words[5] = bytes
  words[6] = bytes / 2 ** 32
  words[7] = members === undefined ? layoutHash(tensors) : hashOf(members)
  words[8] = places === undefined || places.length === 0 ? 0 : placesHash(places)
}

/** How an operation reads in a message: `allReduce #12 (sum, 2 x float32, 4096 bytes, layout 1f00aa42)`. */
export function describeOperation(operation: Operation): string {
  const words = new Int32Array(OPERATION_WORDS)
  encodeOperation(operation, words)
  return describeEncoded(words)
}

/** As {@link describeOperation}, of an encoded operation. */
export function describeEncoded(words: Int32Array): string {
  const { sequence, kind, onDevice, detail, dtype, tensors, bytes, layout, places } = decode(words)
  const details = [detail, onDevice ? 'on the device' : '']
  if (tensors > 0) {
    details.push(`${tensors} x ${dtype ?? 'mixed dtypes'}`, `${bytes} bytes`, `layout ${layout.toString(16)}`)
  }
  if (kind === 'newGroup') details.push(`members ${layout.toString(16)}`)
  if (places !== 0) details.push(`in shared memory, place ${places.toString(16)}`)
  const text = details.filter((part) => part !== '').join(', ')
  return text === '' ? `${kind} #${sequence}` : `${kind} #${sequence} (${text})`
}

function decode(words: Int32Array): Fingerprint {
  const [sequence, kindIndex, detail, dtype, tensors, low, high, layout, places] = [...words] as EncodedOperation
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
    places: places >>> 0,
  }
}

type EncodedOperation = [number, number, number, number, number, number, number, number, number]

function describeDetail(kind: OperationKind, detail: number): string {
  if (kind === 'broadcast') return `from rank ${detail}`
  if (kind === 'newGroup') return `${detail} ranks`
  return kind === 'allReduce' || kind === 'reduceScatter' ? (REDUCE_OPS[detail] as string) : ''
}

function commonDtype(tensors: readonly TensorLayout[]): number {
  const [first] = tensors
  return first !== undefined && tensors.every(({ dtype }) => dtype === first.dtype) ? DTYPES.indexOf(first.dtype) : -1
}

// FNV-1a, a word at a time.
const HASH_START = 0x811c9dc5
const hashWith = (hash: number, value: number) => Math.imul(hash ^ value, 0x01000193)

/** Over the dtype and the shape of every tensor. */
function layoutHash(tensors: readonly TensorLayout[]): number {
  let hash = HASH_START
  for (const { dtype, shape } of tensors) {
    hash = hashWith(hashWith(hash, DTYPES.indexOf(dtype)), shape.length)
    for (const size of shape) hash = hashWith(hash, size)
  }
  return hash
}

function hashOf(numbers: readonly number[]): number {
  return numbers.reduce(hashWith, HASH_START)
}

/** Never 0, which stands for no place. */
function placesHash(places: readonly SharedPlace[]): number {
  return hashOf(places.flatMap(({ allocation, offset }) => [allocation, offset])) || 1
}

/**
 * Refuses arguments that no rank could run.
 *
 * @param reducible dtypes that can be reduced. @default what all collectives on the CPU reduce
 * @throws RankwiseError `COLLECTIVE_DTYPE`, `COLLECTIVE_SHAPE`, `COLLECTIVE_OP`, `COLLECTIVE_SOURCE`, `GROUP_RANKS`.
 */
export function requireValid(
  operation: Operation,
  worldSize: number,
  reducible: readonly DType[] = REDUCIBLE_DTYPES,
): void {
  const { kind, reduceOp, source, tensors, members } = operation
  if (members !== undefined) requireMembers(operation, members, worldSize)
  if (kind === 'allocate') for (const tensor of tensors) requireSizes(operation, tensor)
  if (reduceOp !== undefined) requireReducible(operation, reduceOp, reducible)
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

function requireReducible(operation: Operation, reduceOp: ReduceOp, reducible: readonly DType[]): void {
  if (!REDUCE_OPS.includes(reduceOp)) {
    throw new RankwiseError('COLLECTIVE_OP', 'the reduction is unknown', {
      where: where(operation),
      actual: { op: reduceOp },
      rule: `op is one of ${REDUCE_OPS.join(', ')}`,
    })
  }
  const index = operation.tensors.findIndex(({ dtype }) => !reducible.includes(dtype))
  if (index >= 0) {
    const { dtype } = operation.tensors[index] as TensorLayout
    throw new RankwiseError('COLLECTIVE_DTYPE', 'tensors of this dtype cannot be reduced', {
      where: where(operation),
      actual: { tensor: index, dtype },
      rule: `dtype is one of ${reducible.join(', ')}`,
      remedy: 'cast the tensor first',
    })
  }
}

function requireRows(operation: Operation, { shape }: TensorLayout, divisor: number): void {
  const [rows] = shape
  if (rows !== undefined && rows % divisor === 0) return
  throw new RankwiseError('COLLECTIVE_SHAPE', 'dim 0 cannot be shared between the ranks', {
    where: where(operation),
    actual: { shape, elements: sizeOf(shape), ...(divisor > 1 ? { worldSize: divisor } : {}) },
    rule: divisor > 1 ? 'dim 0 is divisible by worldSize' : 'the tensor has at least one dimension',
  })
}

function requireSizes(operation: Operation, { dtype, shape }: TensorLayout): void {
  if (!DTYPES.includes(dtype)) {
    throw new RankwiseError('COLLECTIVE_DTYPE', 'the dtype is unknown', {
      where: where(operation),
      actual: { dtype },
      rule: `dtype is one of ${DTYPES.join(', ')}`,
    })
  }
  if (shape.every((size) => Number.isInteger(size) && size >= 0)) return
  throw new RankwiseError('COLLECTIVE_SHAPE', 'the shape is none', {
    where: where(operation),
    actual: { shape },
    rule: 'sizes are integers from 0',
  })
}

function requireMembers(operation: Operation, members: readonly number[], worldSize: number): void {
  const valid = members.every((rank) => Number.isInteger(rank) && rank >= 0 && rank < worldSize)
  if (valid && members.length > 0 && new Set(members).size === members.length) return
  throw new RankwiseError('GROUP_RANKS', 'a group cannot have these ranks', {
    where: where(operation),
    actual: { ranks: members, worldSize },
    rule: 'at least one rank, from 0 to worldSize - 1, each once',
  })
}

/** Names the call; the rest of an invalid operation cannot be described. */
function where({ kind, sequence }: Operation): string {
  return `${kind} #${sequence}`
}
