import { Module, Parameter, rmsNorm, type TracedTensor } from '@rankwise/core'
import { isRounded } from './rounding.ts'

/** Root-mean-square norm over the last dimension; in 16 bits it is rounded before it is scaled, as in transformers. */
export class DecoderRMSNorm extends Module {
  readonly weight: Parameter
  readonly #eps: number

  constructor(width: number, eps: number) {
    super()
    this.weight = new Parameter([width])
    this.#eps = eps
  }

  override forward(x: TracedTensor): TracedTensor {
    const [eps, weight] = [this.#eps, this.weight]
    return isRounded(x) ? rmsNorm(x, { eps }).mul(weight) : rmsNorm(x, { eps, weight })
  }
}
