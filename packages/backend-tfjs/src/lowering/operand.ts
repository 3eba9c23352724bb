import type { Shape, TensorType } from '@rankwise/core'
import { inverse } from '../device-tensor.ts'
import type { Engine, Ref } from '../engine.ts'
import type { Operand, StoredRef } from './rule.ts'

/** A value: an input, a constant, or what a rule computed. */
export function valueOperand({ dtype, shape }: TensorType, ref: Ref): Operand {
  return { dtype, shape, ref }
}

/** A weight, which is cast and put in order when a rule asks for it as a value. */
export class WeightOperand implements Operand {
  readonly dtype: TensorType['dtype']
  readonly shape: Shape
  readonly stored: StoredRef
  readonly #engine: Engine

  constructor(engine: Engine, { dtype, shape }: TensorType, stored: StoredRef) {
    this.#engine = engine
    this.dtype = dtype
    this.shape = shape
    this.stored = stored
  }

  get ref(): Ref {
    const { ref, order } = this.stored
    const float32 = ref.dtype === 'bfloat16' ? this.#engine.cast(ref, 'float32') : ref
    return order.every((dim, i) => dim === i) ? float32 : this.#engine.transpose(float32, inverse(order))
  }
}
