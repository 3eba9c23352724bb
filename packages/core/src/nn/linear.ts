import { linear } from '../functional.ts'
import { Module } from '../module.ts'
import { Parameter } from '../parameter.ts'
import type { TracedTensor } from '../traced-tensor.ts'

/** Bias and the inner structure of a fused projection. */
export interface LinearOptions {
  /** @default true */
  readonly bias?: boolean
  /** Sizes of the fused projections along the rows of the weight, for a `packedColwise()` style without blocks. */
  readonly packedColBlocks?: readonly number[]
  /** Sizes of the joined inputs along the columns of the weight, for a `packedRowwise()` style without blocks. */
  readonly packedRowBlocks?: readonly number[]
  /** Number of heads that the rows of the weight are, for a `colwiseHeads()` style without them. */
  readonly heads?: number
}

/** `x @ weight.T + bias` with weight `[outFeatures, inFeatures]`, as torch stores it. */
export class Linear extends Module {
  readonly weight: Parameter
  readonly bias: Parameter | undefined
  readonly packedColBlocks: readonly number[] | undefined
  readonly packedRowBlocks: readonly number[] | undefined
  readonly heads: number | undefined

  constructor(inFeatures: number, outFeatures: number, options: LinearOptions = {}) {
    super()
    this.weight = new Parameter([outFeatures, inFeatures])
    this.bias = (options.bias ?? true) ? new Parameter([outFeatures]) : undefined
    this.packedColBlocks = options.packedColBlocks
    this.packedRowBlocks = options.packedRowBlocks
    this.heads = options.heads
  }

  /** x `[.., inFeatures]` to `[.., outFeatures]`. */
  override forward(x: TracedTensor): TracedTensor {
    return linear(x, this.weight, this.bias)
  }
}
