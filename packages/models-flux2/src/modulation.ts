import { concat, LayerNorm, Linear, Module, type TracedTensor } from '@rankwise/core'

/** What one sub-block's AdaLN takes, each `[batch, 1, dim]`. */
export interface Modulation {
  readonly shift: TracedTensor
  readonly scale: TracedTensor
  readonly gate: TracedTensor
}

/** Tokens that follow each other and are modulated alike. */
export interface ModulatedSection {
  readonly tokens: number
  readonly modulation: Modulation
}

/** How the tokens of a sequence are modulated: all alike, or in sections that make up the sequence. */
export type TokenModulation = Modulation | readonly ModulatedSection[]

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

/** `x * (1 + scale) + shift` of x `[batch, tokens, dim]`. */
export function modulate(x: TracedTensor, modulation: TokenModulation): TracedTensor {
  return bySection([x], modulation, ([part], of) => scaleAndShift(part, of))
}

/** `x + gate * update`, both `[batch, tokens, dim]`. */
export function addGated(x: TracedTensor, update: TracedTensor, modulation: TokenModulation): TracedTensor {
  return bySection([x, update], modulation, ([part, change], { gate }) => part.add(gate.mul(change)))
}

function scaleAndShift(x: TracedTensor, { shift, scale }: Omit<Modulation, 'gate'>): TracedTensor {
  return x.mul(scale.add(1)).add(shift)
}

/** Maps the tokens of each section by its own modulation, which is not spread over them: it is one row for all. */
function bySection<const X extends readonly TracedTensor[]>(
  sequences: X,
  modulation: TokenModulation,
  map: (sequences: X, modulation: Modulation) => TracedTensor,
): TracedTensor {
  if (!isSectioned(modulation)) return map(sequences, modulation)
  const sizes = modulation.map(({ tokens }) => tokens)
  const pieces = sequences.map((sequence) => sequence.split(sizes, 1))
  const mapped = modulation.map((section, i) =>
    map(pieces.map((parts) => parts[i] as TracedTensor) as unknown as X, section.modulation),
  )
  return concat(mapped, 1)
}

function isSectioned(modulation: TokenModulation): modulation is readonly ModulatedSection[] {
  return Array.isArray(modulation)
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
    return scaleAndShift(this.norm.call(x), { shift, scale })
  }
}
