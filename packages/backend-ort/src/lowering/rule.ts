import type { TensorType } from '@rankwise/core'
import type { OnnxBuilder } from '../onnx/onnx-builder.ts'
import type { WeightDType } from '../weight-storage.ts'

/** A value of the ONNX graph that is a part of an operand or result. */
export interface Part {
  readonly name: string
  /** Along the dimension that it is a part of. */
  readonly size: number
}

/** Consecutive parts that make up a value. */
export interface Parts {
  readonly dim: number
  readonly parts: readonly Part[]
  /** Of a result that is bfloat16: whether the parts are rounded to it already. @default false */
  readonly isRounded?: boolean
}

/** A weight as it is stored: in parts along dimension 0. */
export interface StoredParts extends Parts {
  /** Graphs may take 16-bit floats as uint16 and reinterpret them, see `toFloat32`. */
  readonly dtype: WeightDType
}

/** An operand as a rule sees it. */
export interface Operand extends TensorType {
  /** The name of its value in the ONNX graph. Asking for it joins what is in parts, so a rule that can should take these. */
  readonly name: string
  /** What it is computed in; one part where the value is whole. */
  readonly parts: Parts
  /** Of a weight, before it is cast; undefined for everything else. */
  readonly stored?: StoredParts | undefined
  /** Of a weight. */
  readonly storedDType?: WeightDType | undefined
  /** Of a weight: as `stored`, in parts of at most `most` rows. */
  storedTiles?(most: number): StoredParts
}

/** A result as a rule sees it. */
export interface Result extends TensorType {
  /** Whether anything reads it. */
  readonly isUsed: boolean
}

export interface LoweringContext<A> {
  readonly onnx: OnnxBuilder
  readonly attributes: A
  readonly outputs: readonly Result[]
}

/** A result of a rule: the name of its value, or those of its parts, which are joined where that is needed. */
export type Lowered = string | Parts

/**
 * Emits the ONNX nodes of one operation and returns its results, in order; that of an unused one may be empty. The
 * operands have passed the operation's `infer` rule, and at least one used result has elements.
 */
export type LoweringRule = (context: LoweringContext<never>, ...inputs: Operand[]) => readonly Lowered[]

/** Rules by the name of the operation. */
export type LoweringRules = Readonly<Record<string, LoweringRule>>
