import { LayerNorm, Linear, Module, type TracedTensor } from '@rankwise/core'

/** What one sub-block's AdaLN takes, each `[batch, 1, dim]`. */
export interface Modulation {
  readonly shift: TracedTensor
  readonly scale: TracedTensor
  readonly gate: TracedTensor
}

/** Modulation of all blocks of one kind from the timestep embedding. */
export class Flux2Modulation extends Module {
  readonly linear: Linear
  readonly #sets: number

  /** @param sets - how many sub-blocks each block modulates */
  constructor(dim: number, sets: number) {
    super()
    this.linear = new Linear(dim, dim * 3 * sets, { bias: false })
    this.#sets = sets
  }

  /** `[batch, dim]` to one modulation per sub-block. */
  override forward(temb: TracedTensor): readonly Modulation[] {
    const parts = this.linear
      .call(temb.silu())
      .unsqueeze(1)
      .chunk(3 * this.#sets, -1)
    return Array.from({ length: this.#sets }, (_, i) => {
      const [shift, scale, gate] = parts.slice(3 * i, 3 * i + 3) as [TracedTensor, TracedTensor, TracedTensor]
      return { shift, scale, gate }
    })
  }
}

/** `norm(x) * (1 + scale) + shift`. */
export function modulate(x: TracedTensor, { shift, scale }: Omit<Modulation, 'gate'>): TracedTensor {
  return x.mul(scale.add(1)).add(shift)
}

/** The final norm, scaled and shifted by the timestep embedding. */
export class AdaLayerNormContinuous extends Module {
  readonly linear: Linear
  readonly norm: LayerNorm

  constructor(dim: number, eps: number) {
    super()
    this.linear = new Linear(dim, dim * 2, { bias: false })
    this.norm = new LayerNorm(dim, { eps, elementwiseAffine: false })
  }

  /** x `[batch, tokens, dim]`, temb `[batch, dim]`. */
  override forward(x: TracedTensor, temb: TracedTensor): TracedTensor {
    const [scale, shift] = this.linear.call(temb.silu()).unsqueeze(1).chunk(2, -1) as [TracedTensor, TracedTensor]
    return modulate(this.norm.call(x), { shift, scale })
  }
}
