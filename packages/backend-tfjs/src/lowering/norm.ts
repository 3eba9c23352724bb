import { sizeOf } from '@rankwise/core'
import type { Engine, Ref } from '../engine.ts'
import type { Operand, RuleContext, Rules } from './rule.ts'

type NormAttributes = { readonly eps: number }

/**
 * The variance is taken around the mean, and the mean of what is left is taken off once more: kernels that add one number
 * after the other round the mean of 128 numbers around 30 so much that the result is wrong by 5e-6 instead of 2e-7.
 */
function layerNorm(
  { engine, attributes: { eps } }: RuleContext<NormAttributes>,
  x: Operand,
  weight?: Operand,
  bias?: Operand,
) {
  const rows = toRows(engine, x)
  const centred = withoutMean(engine, withoutMean(engine, rows))
  const scaled = engine.binary('div', centred, rootMeanSquare(engine, centred, eps))
  return [engine.reshape(affine(engine, scaled, weight?.ref, bias?.ref), x.shape)]
}

function rmsNorm({ engine, attributes: { eps } }: RuleContext<NormAttributes>, x: Operand, weight?: Operand) {
  const rows = toRows(engine, x)
  const scaled = engine.binary('div', rows, rootMeanSquare(engine, rows, eps))
  return [engine.reshape(affine(engine, scaled, weight?.ref, undefined), x.shape)]
}

/** x as `[rows, width]`. */
function toRows(engine: Engine, { ref, shape }: Operand): Ref {
  const width = shape.at(-1) as number
  return engine.reshape(ref, [sizeOf(shape) / width, width])
}

function withoutMean(engine: Engine, rows: Ref): Ref {
  return engine.binary('sub', rows, engine.reduce('mean', rows))
}

/** `sqrt(mean(x²) + eps)` of every row, `[rows, 1]`. */
function rootMeanSquare(engine: Engine, rows: Ref, eps: number): Ref {
  const power = engine.reduce('mean', engine.unary('square', rows))
  return engine.unary('sqrt', engine.binary('add', power, engine.scalar(eps)))
}

function affine(engine: Engine, x: Ref, weight: Ref | undefined, bias: Ref | undefined): Ref {
  const scaled = weight === undefined ? x : engine.binary('mul', x, weight)
  return bias === undefined ? scaled : engine.binary('add', scaled, bias)
}

type GroupNormAttributes = { readonly groups: number; readonly eps: number }

function groupNorm(
  { engine, attributes: { groups, eps } }: RuleContext<GroupNormAttributes>,
  x: Operand,
  weight: Operand,
  bias: Operand,
) {
  const [batch, channels] = x.shape as [number, number, number, number]
  const grouped = engine.reshape(x.ref, [batch * groups, sizeOf(x.shape) / (batch * groups)])
  const sizes = [x.shape[3], x.shape[2], channels / groups] as number[]
  const centred = engine.binary('sub', grouped, groupMean(engine, grouped, sizes))
  const variance = groupMean(engine, engine.unary('square', centred), sizes)
  const deviation = engine.unary('sqrt', engine.binary('add', variance, engine.scalar(eps)))
  const normalised = engine.reshape(engine.binary('div', centred, deviation), [
    batch,
    channels,
    sizeOf(x.shape.slice(2)),
  ])
  const perChannel = ({ ref }: Operand) => engine.reshape(ref, [1, channels, 1])
  return [engine.reshape(affine(engine, normalised, perChannel(weight), perChannel(bias)), x.shape)]
}

/**
 * The mean of every group, `[groups, 1]`, over one dimension after the other: summed in one go, a million numbers lose
 * three digits.
 *
 * @param x - `[groups, elements]`
 * @param sizes - whose product is the elements of a group
 */
function groupMean(engine: Engine, x: Ref, sizes: readonly number[]): Ref {
  return sizes.reduce((value, size) => {
    return engine.reduce('mean', engine.reshape(value, [sizeOf(value.shape) / size, size]))
  }, x)
}

export const normRules: Rules = { layer_norm: layerNorm, rms_norm: rmsNorm, group_norm: groupNorm }
