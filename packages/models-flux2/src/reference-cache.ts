import type { RetainedTensor } from '@rankwise/core'

/**
 * Keys and values that reference tokens have in every block, `[batch, tokens, heads, headDim]`, for the steps after the
 * first. They are on the backend; of a split model, each rank has those of its heads.
 */
export class Flux2ReferenceCache implements Disposable {
  /** Reference tokens. */
  readonly tokens: number
  readonly #tensors: Readonly<Record<string, RetainedTensor>>

  constructor(tokens: number, tensors: Readonly<Record<string, RetainedTensor>>) {
    this.tokens = tokens
    this.#tensors = tensors
  }

  /** By name: `keys.0`, `values.0`, `keys.1`, … in the order of the blocks. */
  get tensors(): Readonly<Record<string, RetainedTensor>> {
    return this.#tensors
  }

  /** Frees the memory; idempotent. */
  dispose(): void {
    for (const tensor of Object.values(this.#tensors)) tensor.dispose()
  }

  /** `dispose`, for `using`. */
  [Symbol.dispose](): void {
    this.dispose()
  }
}
