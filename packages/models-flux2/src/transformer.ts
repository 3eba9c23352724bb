import {
  concat,
  type Graph,
  Linear,
  ModelMixin,
  ModuleList,
  RankwiseError,
  type RunOptions,
  Tensor,
  type TracedTensor,
  trace,
} from '@rankwise/core'
import type { RotaryTables } from './attention.ts'
import { type Flux2TransformerConfig, parseFlux2TransformerConfig } from './config.ts'
import { AdaLayerNormContinuous, Flux2Modulation, type Modulation } from './modulation.ts'
import { flux2Plan } from './plan.ts'
import { rotaryTables } from './rotary-tables.ts'
import { Flux2TimestepGuidanceEmbeddings } from './time-embedding.ts'
import { Flux2SingleTransformerBlock, Flux2TransformerBlock, type Streams } from './transformer-blocks.ts'

/** What the transformer predicts from. */
export interface Flux2TransformerInputs {
  /** Packed latents, float32 `[batch, imageTokens, inChannels]`. */
  readonly hiddenStates: Tensor
  /** Prompt embeddings, float32 `[batch, textTokens, jointAttentionDim]`. */
  readonly encoderHiddenStates: Tensor
  /** Noise level in [0, 1], float32 `[batch]`. */
  readonly timestep: Tensor
  /** (T, H, W, L) of every image token, int32 `[imageTokens, 4]`. */
  readonly imgIds: Tensor
  /** (T, H, W, L) of every text token, int32 `[textTokens, 4]`. */
  readonly txtIds: Tensor
  /** Guidance scale, float32 `[batch]`; only for models that embed it. */
  readonly guidance?: Tensor | undefined
}

interface ForwardInputs {
  readonly hidden_states: TracedTensor
  readonly encoder_hidden_states: TracedTensor
  readonly timestep: TracedTensor
  readonly guidance?: TracedTensor
  readonly rotary_cos: TracedTensor
  readonly rotary_sin: TracedTensor
}

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
    const temb = this.time_guidance_embed.call(inputs.timestep.mul(1000), inputs.guidance?.mul(1000))
    const imageModulations = this.double_stream_modulation_img.call(temb)
    const textModulations = this.double_stream_modulation_txt.call(temb)
    const [singleModulation] = this.single_stream_modulation.call(temb) as [Modulation]
    const rotary: RotaryTables = { cos: inputs.rotary_cos, sin: inputs.rotary_sin }
    let streams = {
      image: this.x_embedder.call(inputs.hidden_states),
      text: this.context_embedder.call(inputs.encoder_hidden_states),
    }
    const doubleBlocks: Streams[] = []
    for (const block of this.transformer_blocks) {
      streams = block.call(streams, imageModulations, textModulations, rotary)
      doubleBlocks.push(streams)
    }
    let joined = concat([streams.text, streams.image], 1)
    const singleBlocks: TracedTensor[] = []
    for (const block of this.single_transformer_blocks) {
      joined = block.call(joined, singleModulation, rotary)
      singleBlocks.push(joined)
    }
    const image = joined.slice(1, streams.text.size(1))
    return { sample: this.proj_out.call(this.norm_out.call(image, temb)), temb, doubleBlocks, singleBlocks }
  }

  /**
   * Predicts the velocity at a noise level: float32 `[batch, imageTokens, outChannels]`.
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

  /** The graph's inputs: checked, with rotary tables for the position ids. */
  protected tensorsOf(inputs: Flux2TransformerInputs) {
    this.#check(inputs)
    const { cos, sin } = rotaryTables(
      joinIds(inputs.txtIds, inputs.imgIds),
      this.config.axesDimsRope,
      this.config.ropeTheta,
    )
    return {
      hidden_states: inputs.hiddenStates,
      encoder_hidden_states: inputs.encoderHiddenStates,
      timestep: inputs.timestep,
      rotary_cos: cos,
      rotary_sin: sin,
      ...(inputs.guidance === undefined ? {} : { guidance: inputs.guidance }),
    }
  }

  override traceExample(): Graph {
    return this.trace({ imageTokens: 6, textTokens: 3 })
  }

  /** The computation at given sizes, for reports: `rankwise plan --graph` prints it. */
  trace(sizes: { readonly imageTokens: number; readonly textTokens: number; readonly batch?: number }): Graph {
    const { imageTokens, textTokens, batch = 1 } = sizes
    const { inChannels, jointAttentionDim, attentionHeadDim, guidanceEmbeds } = this.config
    const float32 = (...shape: number[]) => ({ dtype: 'float32' as const, shape })
    const types = {
      hidden_states: float32(batch, imageTokens, inChannels),
      encoder_hidden_states: float32(batch, textTokens, jointAttentionDim),
      timestep: float32(batch),
      rotary_cos: float32(textTokens + imageTokens, attentionHeadDim / 2),
      rotary_sin: float32(textTokens + imageTokens, attentionHeadDim / 2),
      ...(guidanceEmbeds ? { guidance: float32(batch) } : {}),
    }
    return trace(this.constructor.name, this, types, (traced) => ({ sample: this.forward(traced).sample }))
  }

  #check({ hiddenStates, encoderHiddenStates, timestep, imgIds, txtIds, guidance }: Flux2TransformerInputs): void {
    const [batch, imageTokens] = hiddenStates.shape
    const textTokens = encoderHiddenStates.shape[1]
    const { inChannels, jointAttentionDim, guidanceEmbeds } = this.config
    const expected: [string, Tensor | undefined, readonly (number | undefined)[] | undefined][] = [
      ['hiddenStates', hiddenStates, [batch, imageTokens, inChannels]],
      ['encoderHiddenStates', encoderHiddenStates, [batch, textTokens, jointAttentionDim]],
      ['timestep', timestep, [batch]],
      ['imgIds', imgIds, [imageTokens, 4]],
      ['txtIds', txtIds, [textTokens, 4]],
      ['guidance', guidance, guidanceEmbeds ? [batch] : undefined],
    ]
    for (const [name, tensor, shape] of expected) {
      if (tensor?.shape.join() === shape?.join()) continue
      throw new RankwiseError('TRANSFORMER_INPUT', `${name} does not fit the model`, {
        where: name,
        actual: { given: tensor?.shape ?? 'nothing', expected: shape ?? 'nothing' },
        rule: 'shapes agree with each other and with the config; guidance is given exactly where the model embeds it',
      })
    }
  }
}

/** Position ids of text tokens, then image tokens. */
function joinIds(txtIds: Tensor, imgIds: Tensor): Tensor<'int32'> {
  const ids = Int32Array.from([...txtIds.data, ...imgIds.data], Number)
  return Tensor.int32([(txtIds.shape[0] as number) + (imgIds.shape[0] as number), 4], ids)
}
