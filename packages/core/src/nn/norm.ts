import { groupNorm, layerNorm, rmsNorm } from '../functional.ts'
import { Module } from '../module.ts'
import { Parameter } from '../parameter.ts'
import type { TracedTensor } from '../traced-tensor.ts'

/** Layer norm over the last dimension. */
export class LayerNorm extends Module {
  readonly weight: Parameter | undefined
  readonly bias: Parameter | undefined
  readonly #eps: number

  /**
   * @param options.eps - @default 1e-5
   * @param options.elementwiseAffine - whether there are weight and bias. @default true
   */
  constructor(width: number, options: { readonly eps?: number; readonly elementwiseAffine?: boolean } = {}) {
    super()
    const affine = options.elementwiseAffine ?? true
    this.weight = affine ? new Parameter([width]) : undefined
    this.bias = affine ? new Parameter([width]) : undefined
    this.#eps = options.eps ?? 1e-5
  }

  override forward(x: TracedTensor): TracedTensor {
    return layerNorm(x, { eps: this.#eps, weight: this.weight, bias: this.bias })
  }
}

/** Root-mean-square norm over the last dimension, with a weight. */
export class RMSNorm extends Module {
  readonly weight: Parameter
  readonly #eps: number

  constructor(width: number, options: { readonly eps: number }) {
    super()
    this.weight = new Parameter([width])
    this.#eps = options.eps
  }

  override forward(x: TracedTensor): TracedTensor {
    return rmsNorm(x, { eps: this.#eps, weight: this.weight })
  }
}

/** Group norm of `[batch, channels, height, width]`. */
export class GroupNorm extends Module {
  readonly weight: Parameter
  readonly bias: Parameter
  readonly #groups: number
  readonly #eps: number

  constructor(groups: number, channels: number, options: { readonly eps: number }) {
    super()
    this.weight = new Parameter([channels])
    this.bias = new Parameter([channels])
    this.#groups = groups
    this.#eps = options.eps
  }

  override forward(x: TracedTensor): TracedTensor {
    return groupNorm(x, { groups: this.#groups, eps: this.#eps, weight: this.weight, bias: this.bias })
  }
}
