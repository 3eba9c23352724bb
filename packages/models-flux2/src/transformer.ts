import {
  concat,
  type Graph,
  Linear,
  ModelMixin,
  ModuleList,
  type RunOptions,
  type Tensor,
  type TracedTensor,
  trace,
} from '@rankwise/core'
import { type Flux2TransformerConfig, parseFlux2TransformerConfig } from './config.ts'
import { AdaLayerNormContinuous, Flux2Modulation, type Modulation, type TokenModulation } from './modulation.ts'
import { flux2Plan } from './plan.ts'
import { Flux2ReferenceCache } from './reference-cache.ts'
import { Flux2TimestepGuidanceEmbeddings } from './time-embedding.ts'
import {
  FullAttention,
  type KeyValues,
  ReferenceExtraction,
  ReferenceReuse,
  type TokenAttention,
} from './token-attention.ts'
import { Flux2SingleTransformerBlock, Flux2TransformerBlock, type Streams } from './transformer-blocks.ts'
import {
  type Flux2ReferenceInputs,
  type Flux2TraceSizes,
  type Flux2TransformerInputs,
  type GraphInputs,
  graphInputs,
  graphInputTypes,
  requireInputs,
  requireReferences,
} from './transformer-inputs.ts'

type ForwardInputs = GraphInputs<TracedTensor>

interface ForwardOutputs {
  /** `[batch, imageTokens, outChannels]` */
  readonly sample: TracedTensor
  /** `[batch, dim]` */
  readonly temb: TracedTensor
  /** Both streams behind every double-stream block. */
  readonly doubleBlocks: readonly Streams[]
  /** `[batch, textTokens + imageTokens, dim]` behind every single-stream block. */
  readonly singleBlocks: readonly TracedTensor[]
}

/** How all blocks are modulated. */
interface Modulations {
  readonly image: readonly TokenModulation[]
  readonly text: readonly TokenModulation[]
  readonly single: TokenModulation
}

/** The FLUX.2 transformer: double-stream blocks, then single-stream blocks, over text and image tokens. */
export class Flux2Transformer2DModel extends ModelMixin {
  static readonly tensorParallelPlan = flux2Plan

  readonly config: Flux2TransformerConfig
  readonly time_guidance_embed: Flux2TimestepGuidanceEmbeddings
  readonly double_stream_modulation_img: Flux2Modulation
  readonly double_stream_modulation_txt: Flux2Modulation
  readonly single_stream_modulation: Flux2Modulation
  readonly x_embedder: Linear
  readonly context_embedder: Linear
  readonly transformer_blocks: ModuleList<Flux2TransformerBlock>
  readonly single_transformer_blocks: ModuleList<Flux2SingleTransformerBlock>
  readonly norm_out: AdaLayerNormContinuous
  readonly proj_out: Linear

  constructor(config: Flux2TransformerConfig) {
    super()
    const dim = config.numAttentionHeads * config.attentionHeadDim
    const sizes = {
      dim,
      heads: config.numAttentionHeads,
      headDim: config.attentionHeadDim,
      mlpRatio: config.mlpRatio,
      eps: config.eps,
    }
    const repeat = <T>(count: number, create: () => T) => Array.from({ length: count }, create)
    this.config = config
    this.time_guidance_embed = new Flux2TimestepGuidanceEmbeddings(
      config.timestepGuidanceChannels,
      dim,
      config.guidanceEmbeds,
    )
    this.double_stream_modulation_img = new Flux2Modulation(dim, 2)
    this.double_stream_modulation_txt = new Flux2Modulation(dim, 2)
    this.single_stream_modulation = new Flux2Modulation(dim, 1)
    this.x_embedder = new Linear(config.inChannels, dim, { bias: false })
    this.context_embedder = new Linear(config.jointAttentionDim, dim, { bias: false })
    this.transformer_blocks = new ModuleList(repeat(config.numLayers, () => new Flux2TransformerBlock(sizes)))
    this.single_transformer_blocks = new ModuleList(
      repeat(config.numSingleLayers, () => new Flux2SingleTransformerBlock(sizes)),
    )
    this.norm_out = new AdaLayerNormContinuous(dim, config.eps)
    this.proj_out = new Linear(dim, config.outChannels, { bias: false })
  }

  /** Builds the model without weights. @throws RankwiseError `CONFIG_INVALID` */
  static fromConfig(config: unknown): Flux2Transformer2DModel {
    return new Flux2Transformer2DModel(parseFlux2TransformerConfig(config))
  }

  override get numAttentionHeads(): number {
    return this.config.numAttentionHeads
  }

  override forward(inputs: ForwardInputs): ForwardOutputs {
    const temb = this.#embedTime(inputs)
    return this.#blocks(inputs, temb, this.#modulations(temb), new FullAttention())
  }

  /**
   * A forward over text, reference and image tokens, of which the references do not depend on the noise: they are
   * modulated as at noise level 0 and attend to themselves only.
   */
  #forwardReferences(inputs: ForwardInputs, references: number): ForwardOutputs & { keyValues: readonly KeyValues[] } {
    const text = inputs.encoder_hidden_states.size(1)
    const image = inputs.hidden_states.size(1) - references
    const temb = this.#embedTime(inputs)
    const own = this.#modulations(temb)
    const still = this.#modulations(this.#embedTime({ ...inputs, timestep: inputs.timestep.mul(0) }))
    const extraction = new ReferenceExtraction({ text, references, image })
    const modulations = {
      text: own.text,
      image: own.image.map((modulation, i) => [
        { tokens: references, modulation: still.image[i] as Modulation },
        { tokens: image, modulation },
      ]),
      single: [
        { tokens: text, modulation: own.single },
        { tokens: references, modulation: still.single },
        { tokens: image, modulation: own.single },
      ],
    }
    const outputs = this.#blocks(inputs, temb, modulations, extraction, references)
    return { ...outputs, keyValues: extraction.extracted }
  }

  #embedTime({ timestep, guidance }: Pick<ForwardInputs, 'timestep' | 'guidance'>): TracedTensor {
    return this.time_guidance_embed.call(timestep.mul(1000), guidance?.mul(1000))
  }

  #modulations(temb: TracedTensor) {
    const image = this.double_stream_modulation_img.call(temb)
    const text = this.double_stream_modulation_txt.call(temb)
    const [single] = this.single_stream_modulation.call(temb) as [Modulation]
    return { image, text, single }
  }

  /** @param skipped - image tokens that nothing is predicted for, the first of them */
  #blocks(
    inputs: ForwardInputs,
    temb: TracedTensor,
    modulations: Modulations,
    tokens: TokenAttention,
    skipped = 0,
  ): ForwardOutputs {
    const context = { cos: inputs.rotary_cos, sin: inputs.rotary_sin, tokens }
    let streams = {
      image: this.x_embedder.call(inputs.hidden_states),
      text: this.context_embedder.call(inputs.encoder_hidden_states),
    }
    const doubleBlocks: Streams[] = []
    for (const block of this.transformer_blocks) {
      streams = block.call(streams, modulations.image, modulations.text, context)
      doubleBlocks.push(streams)
    }
    let joined = concat([streams.text, streams.image], 1)
    const singleBlocks: TracedTensor[] = []
    for (const block of this.single_transformer_blocks) {
      joined = block.call(joined, modulations.single, context)
      singleBlocks.push(joined)
    }
    const image = joined.slice(1, streams.text.size(1) + skipped)
    return { sample: this.proj_out.call(this.norm_out.call(image, temb)), temb, doubleBlocks, singleBlocks }
  }

  /**
   * Predicts the velocity at a noise level: `[batch, imageTokens, outChannels]` in the dtype of the model.
   *
   * @throws RankwiseError `TRANSFORMER_INPUT`, `ABORTED`, and those of the backend and the collectives
   */
  async run(inputs: Flux2TransformerInputs, options?: RunOptions): Promise<Tensor> {
    const { sample } = await this.execute(
      'forward',
      this.tensorsOf(inputs),
      (traced) => ({ sample: this.forward(traced).sample }),
      options,
    )
    return sample as Tensor
  }

  /**
   * The first step with reference images, whose tokens come before those of the picture in `hiddenStates` and `imgIds`.
   * Later steps leave them out and take the cache instead, of which the caller disposes.
   *
   * @returns the velocity of the picture's tokens, `[batch, imageTokens - referenceTokens, outChannels]` in the dtype of
   *   the model
   * @throws RankwiseError `TRANSFORMER_INPUT`, `ABORTED`, and those of the backend and the collectives
   */
  async extractReferences(
    inputs: Flux2ReferenceInputs,
    options?: RunOptions,
  ): Promise<{ readonly sample: Tensor; readonly cache: Flux2ReferenceCache }> {
    const { referenceTokens } = inputs
    requireReferences(inputs)
    const names = this.#cacheNames()
    const { outputs, retained } = await this.executeRetaining(
      `extractReferences[${referenceTokens}]`,
      this.tensorsOf(inputs),
      names,
      (traced) => {
        const { sample, keyValues } = this.#forwardReferences(traced, referenceTokens)
        const tensors = keyValues.flatMap(({ keys, values }) => [keys, values])
        return { sample, ...Object.fromEntries(names.map((name, i) => [name, tensors[i] as TracedTensor])) }
      },
      options,
    )
    return { sample: outputs.sample as Tensor, cache: new Flux2ReferenceCache(referenceTokens, retained) }
  }

  /**
   * A step after the first with reference images: predicts as `run` does, from what `extractReferences` left behind.
   *
   * @throws RankwiseError `TRANSFORMER_INPUT`, `TENSOR_DISPOSED` when the cache was disposed, `ABORTED`, and those of the
   *   backend and the collectives
   */
  async runCached(inputs: Flux2TransformerInputs, cache: Flux2ReferenceCache, options?: RunOptions): Promise<Tensor> {
    const names = this.#cacheNames()
    const { sample } = await this.execute(
      'runCached',
      { ...this.tensorsOf(inputs), ...cache.tensors },
      (traced) => {
        const tensors = names.map((name) => (traced as Readonly<Record<string, TracedTensor>>)[name] as TracedTensor)
        const extracted = Array.from({ length: tensors.length / 2 }, (_, i) => ({
          keys: tensors[2 * i] as TracedTensor,
          values: tensors[2 * i + 1] as TracedTensor,
        }))
        const temb = this.#embedTime(traced)
        const tokens = new ReferenceReuse(traced.encoder_hidden_states.size(1), extracted)
        return { sample: this.#blocks(traced, temb, this.#modulations(temb), tokens).sample }
      },
      options,
    )
    return sample as Tensor
  }

  /** Of the keys and values of all blocks, in their order. */
  #cacheNames(): readonly string[] {
    const blocks = this.transformer_blocks.length + this.single_transformer_blocks.length
    return Array.from({ length: blocks }, (_, i) => [`keys.${i}`, `values.${i}`]).flat()
  }

  /** The graph's inputs: checked, in the dtype of the model, with rotary tables for the position ids. */
  protected tensorsOf(inputs: Flux2TransformerInputs): GraphInputs<Tensor> {
    requireInputs(inputs, this.config)
    return graphInputs(inputs, this.config, this.dtype)
  }

  override traceExample(): Graph {
    return this.trace({ imageTokens: 6, textTokens: 3 })
  }

  /** The computation at given sizes, for reports: `rankwise plan --graph` prints it. @default dtype 'float32' */
  trace(sizes: Flux2TraceSizes): Graph {
    const { dtype = 'float32' } = sizes
    const types = graphInputTypes(sizes, this.config, dtype)
    return trace(this.constructor.name, this, types, (traced) => ({ sample: this.forward(traced).sample }), dtype)
  }
}
