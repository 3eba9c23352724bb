import { concat, constant, Linear, Module, Tensor, type TracedTensor } from '@rankwise/core'

/** Longest period of the sinusoids, as in "Denoising Diffusion Probabilistic Models" (arXiv:2006.11239). */
const MAX_PERIOD = 10_000

/** `10000^(-i / half)` for i = 0 .. half - 1, every step rounded to float32 as torch rounds it. */
function frequencies(half: number): Float32Array {
  const logPeriod = Math.fround(-Math.log(MAX_PERIOD))
  return Float32Array.from({ length: half }, (_, i) => Math.exp(Math.fround(Math.fround(logPeriod * i) / half)))
}

/** Sinusoids of `[batch]` as `[batch, channels]`: cosines, then sines, of angles in float32 whatever the dtype. */
function sinusoids(x: TracedTensor, channels: number): TracedTensor {
  const half = channels / 2
  const angles = x
    .to('float32')
    .unsqueeze(1)
    .mul(constant(Tensor.float32([half], frequencies(half))))
  return concat([angles.cos(), angles.sin()], -1).to(x.dtype)
}

/** Two-layer network behind the sinusoids. */
export class TimestepEmbedding extends Module {
  readonly linear_1: Linear
  readonly linear_2: Linear

  constructor(channels: number, dim: number) {
    super()
    this.linear_1 = new Linear(channels, dim, { bias: false })
    this.linear_2 = new Linear(dim, dim, { bias: false })
  }

  /** `[batch, channels]` to `[batch, dim]`. */
  override forward(x: TracedTensor): TracedTensor {
    return this.linear_2.call(this.linear_1.call(x).silu())
  }
}

/** Embeds the timestep and, where the model was distilled from guidance, the guidance scale. */
export class Flux2TimestepGuidanceEmbeddings extends Module {
  readonly timestep_embedder: TimestepEmbedding
  readonly guidance_embedder: TimestepEmbedding | undefined
  readonly #channels: number

  constructor(channels: number, dim: number, guidanceEmbeds: boolean) {
    super()
    this.timestep_embedder = new TimestepEmbedding(channels, dim)
    this.guidance_embedder = guidanceEmbeds ? new TimestepEmbedding(channels, dim) : undefined
    this.#channels = channels
  }

  /** timestep and guidance `[batch]`, both times 1000, to `[batch, dim]`. */
  override forward(timestep: TracedTensor, guidance: TracedTensor | undefined): TracedTensor {
    const embedded = this.timestep_embedder.call(sinusoids(timestep, this.#channels))
    if (this.guidance_embedder === undefined || guidance === undefined) return embedded
    return embedded.add(this.guidance_embedder.call(sinusoids(guidance, this.#channels)))
  }
}
