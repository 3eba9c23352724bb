import type { Attributes, Tensor } from '@rankwise/core'

/** One operation on concrete operands. */
export interface OpCase {
  readonly op: string
  readonly title: string
  readonly inputs: readonly Tensor[]
  readonly attributes: Attributes
  /** Operands that stay float32 where the others are in a 16-bit dtype. @default none */
  readonly float32Operands?: readonly number[]
}

/** Which operands of an operation a model gives as weights. */
export const WEIGHT_OPERANDS: Readonly<Record<string, readonly number[]>> = {
  add: [1],
  mul: [1],
  linear: [1],
  embedding: [1],
  layer_norm: [1, 2],
  rms_norm: [1],
  group_norm: [1, 2],
  conv2d: [1, 2],
}
