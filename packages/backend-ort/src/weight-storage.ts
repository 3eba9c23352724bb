import type { DType, Shape } from '@rankwise/core'
import type { ComputeDType } from './host-dtype.ts'

/** Dtypes that weights are kept in. */
export type WeightDType = 'float32' | 'float16' | 'bfloat16'

/** How a weight lies in memory, as far as a graph that reads it depends on it. */
export interface WeightStorage {
  readonly dtype: WeightDType
  /** Rows of its consecutive pieces; a row is an index of dimension 0, and a scalar is one row. */
  readonly pieces: readonly number[]
}

/** Whether weights can stay in `dtype`. */
export function isWeightDType(dtype: DType): dtype is WeightDType {
  return dtype === 'float32' || dtype === 'float16' || dtype === 'bfloat16'
}

/**
 * The dtype that a weight is kept in: that of its file where casting it to `computed` is exact, else `computed`, which it
 * is rounded to when it is read.
 */
export function keptDType(stored: DType, computed: ComputeDType): WeightDType {
  return computed === 'float32' && isWeightDType(stored) ? stored : computed
}

/** The storage of a weight that is in memory in one piece. */
export function wholeStorage(dtype: WeightDType, shape: Shape): WeightStorage {
  return { dtype, pieces: [rowsOf(shape)] }
}

/** `bfloat16`, or with several pieces `bfloat16 768|768|2304`. */
export function formatStorage({ dtype, pieces }: WeightStorage): string {
  return pieces.length === 1 ? dtype : `${dtype} ${pieces.join('|')}`
}

/** Rows of a weight. */
export function rowsOf(shape: Shape): number {
  return shape[0] ?? 1
}

/** The shape of `rows` rows of a weight. */
export function rowsShape(shape: Shape, rows: number): Shape {
  return shape.length === 0 ? shape : shape.with(0, rows)
}
