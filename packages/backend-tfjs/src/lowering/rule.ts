import type { TensorType } from '@rankwise/core'
import type { Engine, Ref } from '../engine.ts'

/** An operand as a rule sees it. */
export interface Operand extends TensorType {
  /** Its elements, in float32 (ids in int32) and in the order of its shape. A weight may be cast and moved for it. */
  readonly ref: Ref
  /** Of a weight, as it is stored: stored dimension i is dimension `order[i]` of the shape. */
  readonly stored?: StoredRef | undefined
}

export interface StoredRef {
  readonly ref: Ref
  readonly order: readonly number[]
}

export interface RuleContext<A> {
  readonly engine: Engine
  readonly attributes: A
  /** Types of the results. */
  readonly outputs: readonly TensorType[]
}

/**
 * Computes one operation and returns its results, in order. What it makes beside them is freed for it. The operands have
 * passed the operation's `infer` rule, and at least one result has elements.
 */
export type Rule = (context: RuleContext<never>, ...inputs: Operand[]) => readonly Ref[]

/** Rules by the name of the operation. */
export type Rules = Readonly<Record<string, Rule>>
