import type { TensorType } from '@rankwise/core'
import type { Operand, RuleContext, Rules } from './rule.ts'

const TO_CHANNELS_LAST = [0, 2, 3, 1]
const TO_CHANNELS_FIRST = [0, 3, 1, 2]
/** `[out, in, height, width]` to `[height, width, in, out]`. */
const FILTER_ORDER = [2, 3, 1, 0]

type Conv2dAttributes = { readonly stride: number; readonly padding: readonly number[] }

/** TensorFlow convolves on the CPU with channels last only. */
function conv2d(
  { engine, attributes: { stride, padding }, outputs: [result] }: RuleContext<Conv2dAttributes>,
  x: Operand,
  weight: Operand,
  bias: Operand,
) {
  const [top, bottom, left, right] = padding as [number, number, number, number]
  const [batch, out, height, width] = (result as TensorType).shape as [number, number, number, number]
  if (x.shape[1] === 0) {
    const perChannel = engine.reshape(bias.ref, [1, out, 1, 1])
    return [engine.tile(perChannel, [batch, 1, height, width])]
  }
  const image = engine.transpose(x.ref, TO_CHANNELS_LAST)
  const isPadded = padding.some((size) => size > 0)
  const padded = isPadded
    ? engine.pad(image, [
        [0, 0],
        [top, bottom],
        [left, right],
        [0, 0],
      ])
    : image
  const filter = weight.stored?.ref ?? engine.transpose(weight.ref, FILTER_ORDER)
  const convolved = engine.binary('add', engine.conv2d(padded, filter, stride), bias.ref)
  return [engine.transpose(convolved, TO_CHANNELS_FIRST)]
}

type UpsampleAttributes = { readonly scale: number }

/** Output pixel i reads input pixel `floor(i / scale)`. */
function upsampleNearest2d(
  { engine, attributes: { scale }, outputs: [result] }: RuleContext<UpsampleAttributes>,
  x: Operand,
) {
  const [batch, channels, height, width] = x.shape as [number, number, number, number]
  const pixels = engine.reshape(x.ref, [batch * channels * height, 1, width, 1])
  return [engine.reshape(engine.tile(pixels, [1, scale, 1, scale]), result?.shape ?? [])]
}

export const spatialRules: Rules = { conv2d, upsample_nearest2d: upsampleNearest2d }
