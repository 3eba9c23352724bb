import { describe, expect, test } from 'vitest'
import {
  describeOperation,
  encodeOperation,
  OPERATION_WORDS,
  type Operation,
  requireValid,
} from '../../src/collectives/operation.ts'
import { RankwiseError, Tensor } from '../../src/index.ts'

const float32 = (...shape: number[]) => Tensor.zeros('float32', shape)
const allReduce = (...tensors: Tensor[]): Operation => ({ sequence: 7, kind: 'allReduce', reduceOp: 'sum', tensors })

function words(operation: Operation): number[] {
  const encoded = new Int32Array(OPERATION_WORDS)
  encodeOperation(operation, encoded)
  return [...encoded]
}

describe('two operations match only if nothing differs', () => {
  const operation = allReduce(float32(2, 3), float32(4))
  test('the same call', () => expect(words(allReduce(float32(2, 3), float32(4)))).toEqual(words(operation)))

  test.each<[string, Operation]>([
    ['sequence', { ...operation, sequence: 8 }],
    ['kind', { ...operation, kind: 'reduceScatter' }],
    ['reduction', { ...operation, reduceOp: 'max' }],
    ['shape of the same size', allReduce(float32(3, 2), float32(4))],
    ['sizes with the same total', allReduce(float32(2, 2), float32(6))],
    ['order', allReduce(float32(4), float32(2, 3))],
    ['number of tensors', allReduce(float32(2, 3))],
    ['dtype', allReduce(Tensor.zeros('int32', [2, 3]), Tensor.zeros('int32', [4]))],
    ['dtype of one tensor', allReduce(float32(2, 3), Tensor.zeros('int32', [4]))],
  ])('another %s', (_, other) => expect(words(other)).not.toEqual(words(operation)))

  test('another source of a broadcast', () => {
    const broadcast = (source: number): Operation => ({ sequence: 1, kind: 'broadcast', source, tensors: [float32(1)] })
    expect(words(broadcast(0))).not.toEqual(words(broadcast(1)))
  })
})

describe('description', () => {
  test.each<[Operation, string | RegExp]>([
    [{ sequence: 3, kind: 'barrier', tensors: [] }, 'barrier #3'],
    [allReduce(float32(2, 3), float32(4)), /^allReduce #7 \(sum, 2 x float32, 40 bytes, layout [0-9a-f]+\)$/],
    [allReduce(float32(2), Tensor.zeros('int32', [2])), /2 x mixed dtypes, 16 bytes/],
    [{ sequence: 1, kind: 'broadcast', source: 2, tensors: [float32(1)] }, /^broadcast #1 \(from rank 2, 1 x float32/],
    [{ sequence: 1, kind: 'allGather', tensors: [float32(1)] }, /^allGather #1 \(1 x float32, 4 bytes/],
  ])('%#', (operation, text) => expect(describeOperation(operation)).toMatch(text))

  test('more than 4 GiB are told correctly', () => {
    const huge = { dtype: 'uint8', shape: [5e9], byteLength: 5e9 } as unknown as Tensor
    expect(describeOperation(allReduce(huge))).toMatch('5000000000 bytes')
  })
})

describe('arguments that no rank could run are refused', () => {
  test.each<[string, Operation]>([
    ['COLLECTIVE_DTYPE', allReduce(float32(1), Tensor.zeros('int64', [1]))],
    ['COLLECTIVE_OP', { ...allReduce(float32(1)), reduceOp: 'mean' as 'sum' }],
    ['COLLECTIVE_SHAPE', { sequence: 1, kind: 'reduceScatter', reduceOp: 'sum', tensors: [float32(5, 2)] }],
    ['COLLECTIVE_SHAPE', { sequence: 1, kind: 'allGather', tensors: [float32()] }],
    ['COLLECTIVE_SOURCE', { sequence: 1, kind: 'broadcast', source: 2, tensors: [float32(1)] }],
    ['COLLECTIVE_SOURCE', { sequence: 1, kind: 'broadcast', source: -1, tensors: [float32(1)] }],
    ['COLLECTIVE_SOURCE', { sequence: 1, kind: 'broadcast', source: 0.5, tensors: [float32(1)] }],
  ])('%s', (code, operation) => {
    expect(() => requireValid(operation, 2)).toThrow(RankwiseError)
    expect(() => requireValid(operation, 2)).toThrow(expect.objectContaining({ code }))
  })
})
