import { type DType, isFloatingPoint, RankwiseError, type Tensor } from '@rankwise/core'
import type { Tolerance } from './expect-close.ts'

/** What rounds alike: families of operations, whole models, and models against another implementation in float32. */
export type ToleranceRow = 'movement' | 'elementwise' | 'linear' | 'norm' | 'attention' | 'model' | 'golden'

/** Bounds relative to what is expected. */
interface Bounds {
  readonly relativeRms: number
  /** Of one value, relative to itself. */
  readonly relative: number
  /** Of one value, relative to the RMS of all, for values that are small because others cancelled. */
  readonly absolute: number
}

type FloatDType = 'float64' | 'float32' | 'float16' | 'bfloat16'

const FAMILIES: Readonly<Record<string, ToleranceRow>> = {
  cast: 'movement',
  embedding: 'movement',
  reshape: 'movement',
  transpose: 'movement',
  split: 'movement',
  concat: 'movement',
  shard: 'movement',
  upsample_nearest2d: 'movement',
  linear: 'linear',
  conv2d: 'linear',
  layer_norm: 'norm',
  rms_norm: 'norm',
  group_norm: 'norm',
  attention: 'attention',
}

const EXACT: Bounds = { relativeRms: 0, relative: 0, absolute: 0 }

/**
 * The one table of tolerances, against float64. float32: every operation of ONNX Runtime keeps 1e-6 relative RMS, and
 * whole FLUX.2 blocks of three engines 2e-6; single values are allowed 20 times as much, because the worst of a million
 * is that much worse than their RMS. An operation in a 16-bit dtype computes in float32 and rounds once, to nearest: each
 * value is off by half a unit of its last of 11 or 8 bits at most, which truncation and rounding twice are not. The tiny
 * transformer, rounded after every operation, is wrong by up to 9e-4 and 7.4e-3. The reference in float64 is bounded only
 * by its own summation order.
 */
const TABLE: Readonly<Record<Exclude<ToleranceRow, 'movement'>, Readonly<Record<FloatDType, Bounds>>>> = {
  elementwise: {
    float64: bounds(1e-14),
    float32: bounds(1e-6),
    float16: rounded(11),
    bfloat16: rounded(8),
  },
  linear: {
    float64: bounds(1e-13),
    float32: bounds(1e-6),
    float16: rounded(11),
    bfloat16: rounded(8),
  },
  norm: {
    float64: bounds(1e-13),
    float32: bounds(1e-6),
    float16: rounded(11),
    bfloat16: rounded(8),
  },
  attention: {
    float64: bounds(1e-13),
    float32: bounds(1e-6),
    float16: rounded(11),
    bfloat16: rounded(8),
  },
  model: {
    float64: bounds(1e-12),
    float32: bounds(2e-6),
    float16: bounds(2e-3),
    bfloat16: bounds(1.5e-2),
  },
  // diffusers in float32 differs from itself by 1e-6 to 6e-6 between one rank and several.
  golden: {
    float64: bounds(2e-5),
    float32: bounds(2e-5),
    float16: bounds(5e-3),
    bfloat16: bounds(4e-2),
  },
}

function bounds(relativeRms: number): Bounds {
  return { relativeRms, relative: 20 * relativeRms, absolute: 20 * relativeRms }
}

/** Of float32 that is rounded to `bits` significant bits: a relative error of 2^-bits, beside what float32 is off by. */
function rounded(bits: number): Bounds {
  return { relativeRms: 2 ** -bits, relative: 2 ** -bits * 1.001, absolute: 2e-5 }
}

/** The row of an operation; those that are not named compute element by element. */
export function toleranceRow(op: string): ToleranceRow {
  return FAMILIES[op] ?? 'elementwise'
}

/**
 * How far values of a dtype may be from what float64 computes from the same operands. Movement and casts are exact, and so
 * are integers.
 *
 * @param expected - whose RMS scales the absolute bound
 * @throws RankwiseError `TOLERANCE_DTYPE` for a dtype that nothing is computed in
 */
export function toleranceOf(row: ToleranceRow, dtype: DType, expected: Tensor): Tolerance {
  const { relativeRms, relative, absolute } = boundsOf(row, dtype)
  return { relativeRms, relative, absolute: absolute * rms(expected) }
}

function boundsOf(row: ToleranceRow, dtype: DType): Bounds {
  if (row === 'movement' || dtype === 'int32') return EXACT
  if (isFloatingPoint(dtype)) return TABLE[row][dtype as FloatDType]
  throw new RankwiseError('TOLERANCE_DTYPE', `there is no tolerance for ${dtype}`, {
    rule: 'operations compute in floating-point dtypes; int32 is exact',
  })
}

/** Over the finite values. */
function rms(tensor: Tensor): number {
  const { data } = tensor.cast('float64')
  const finite = data.filter(Number.isFinite)
  return finite.length === 0 ? 0 : Math.sqrt(finite.reduce((sum, value) => sum + value ** 2, 0) / finite.length)
}
