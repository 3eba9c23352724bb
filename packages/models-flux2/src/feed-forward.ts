import { Linear, Module, type TracedTensor } from '@rankwise/core'

/** `silu(gate) * up`. */
export function swiGlu(gate: TracedTensor, up: TracedTensor): TracedTensor {
  return gate.silu().mul(up)
}

/** Feed-forward network with a gated SiLU. */
export class Flux2FeedForward extends Module {
  readonly linear_in: Linear
  readonly linear_out: Linear

  constructor(dim: number, mlpRatio: number) {
    super()
    const innerDim = Math.trunc(dim * mlpRatio)
    this.linear_in = new Linear(dim, innerDim * 2, { bias: false })
    this.linear_out = new Linear(innerDim, dim, { bias: false })
  }

  /** `[batch, tokens, dim]` to the same. */
  override forward(x: TracedTensor): TracedTensor {
    const [gate, up] = this.linear_in.call(x).chunk(2, -1) as [TracedTensor, TracedTensor]
    return this.linear_out.call(swiGlu(gate, up))
  }
}
