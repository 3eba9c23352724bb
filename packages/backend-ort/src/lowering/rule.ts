import type { TensorType } from '@rankwise/core'
import type { OnnxBuilder } from '../onnx/onnx-builder.ts'

/** An operand as a rule sees it: the name of its value in the ONNX graph, and its type. */
export interface Operand extends TensorType {
  readonly name: string
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

/**
 * Emits the ONNX nodes of one operation and returns the names of its results, in order; that of an unused one may be
 * empty. The operands have passed the operation's `infer` rule, and at least one used result has elements.
 */
export type LoweringRule = (context: LoweringContext<never>, ...inputs: Operand[]) => readonly string[]

/** Rules by the name of the operation. */
export type LoweringRules = Readonly<Record<string, LoweringRule>>
