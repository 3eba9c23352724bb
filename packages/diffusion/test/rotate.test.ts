import { GraphExecutor, Module, partition, Tensor, type TracedTensor, trace } from '@rankwise/core'
import { ReferenceBackend } from '@rankwise/core/reference'
import { expect, it } from 'vitest'
import { rotate } from '../src/decoder/rotate.ts'

const X = [0.035888671875, -1.140625, -0.1748046875, 0.63671875, -0.828125, -0.578125, -0.7109375, 0.72265625]
/** `x * cos + rotate_half(x) * sin` of transformers in bfloat16, by torch 2.15. All 8 differ where it is rounded once. */
const ROTATED = [0.1123046875, -0.208984375, -0.138671875, 1.28125, -0.4140625, 0.20703125, -1.015625, 0.8984375]

const bfloat16 = (shape: readonly number[], values: readonly number[]) =>
  Tensor.float32(shape, Float32Array.from(values)).cast('bfloat16')

class Rotation extends Module {
  override forward(x: TracedTensor, cos: TracedTensor, sin: TracedTensor): TracedTensor {
    return rotate(x, cos, sin)
  }
}

it('rotates in bfloat16 as transformers does, which rounds both products', async () => {
  const inputs = {
    x: bfloat16([1, 1, 2, 4], X),
    cos: bfloat16([1, 2], [0.890625, 0.62109375]),
    sin: bfloat16([1, 2], [0.45703125, -0.78125]),
  }
  const rotation = new Rotation()
  const forward = ({ x, cos, sin }: Record<keyof typeof inputs, TracedTensor>) => ({ y: rotation.call(x, cos, sin) })
  const graph = trace('rotate', rotation, inputs, forward, 'bfloat16')
  await using backend = new ReferenceBackend()
  const options = { backend, collectives: undefined, weights: new Map() }
  const executor = await GraphExecutor.compile(partition(graph, new Map(), 1), options)
  const { y } = await executor.run(inputs)
  await executor.dispose()
  expect(y?.dtype).toBe('bfloat16')
  expect([...(y as Tensor).cast('float32').data]).toEqual(ROTATED)
})
