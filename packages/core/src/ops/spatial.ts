import type { TensorType } from '../graph.ts'
import { defineOp, shapeError } from '../op.ts'
import { sizeOf } from '../tensor.ts'
import { placeReplicated } from './norm.ts'

type Conv2dAttributes = { stride: number; padding: readonly number[] }

/**
 * `conv2d(x [batch, in, height, width], weight [out, in, kh, kw], bias [out])`; `padding` is zeros on
 * [top, bottom, left, right].
 */
defineOp<Conv2dAttributes>({
  name: 'conv2d',
  infer(inputs, { stride, padding }) {
    const [x, weight, bias] = inputs as [TensorType, TensorType, TensorType]
    const [batch, channels, height, width] = x.shape as [number, number, number, number]
    const [out, input, kernelHeight, kernelWidth] = weight.shape as [number, number, number, number]
    const [top, bottom, left, right] = padding as [number, number, number, number]
    const isOneDType = inputs.every(({ dtype }) => dtype === x.dtype)
    if (
      !isOneDType ||
      x.shape.length !== 4 ||
      weight.shape.length !== 4 ||
      input !== channels ||
      bias.shape[0] !== out
    ) {
      throw shapeError('conv2d', inputs, 'x is [batch, in, h, w], weight [out, in, kh, kw], bias [out], of one dtype')
    }
    const shape = [
      batch,
      out,
      Math.floor((height + top + bottom - kernelHeight) / stride) + 1,
      Math.floor((width + left + right - kernelWidth) / stride) + 1,
    ]
    if (!shape.slice(2).every((size) => size > 0))
      throw shapeError('conv2d', inputs, 'the kernel fits into the padded image')
    return [{ dtype: x.dtype, shape }]
  },
  place: (context) => [placeReplicated(context)],
  cost([, weight], [output]) {
    return { flops: 2 * sizeOf((output as TensorType).shape) * sizeOf((weight as TensorType).shape.slice(1)) }
  },
})

type UpsampleAttributes = { scale: number }

/** Repeats every pixel of x `[batch, channels, height, width]` `scale` times in both directions. */
defineOp<UpsampleAttributes>({
  name: 'upsample_nearest2d',
  movesOnly: true,
  infer([x], { scale }) {
    const input = x as TensorType
    const [batch, channels, height, width] = input.shape as [number, number, number, number]
    if (input.shape.length !== 4)
      throw shapeError('upsample_nearest2d', [input], 'x is [batch, channels, height, width]')
    return [{ dtype: input.dtype, shape: [batch, channels, height * scale, width * scale] }]
  },
  place: (context) => [placeReplicated(context)],
  cost: () => ({ flops: 0 }),
})
