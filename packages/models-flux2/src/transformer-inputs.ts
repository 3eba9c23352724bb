import { type DType, RankwiseError, Tensor, type TensorType } from '@rankwise/core'
import type { Flux2TransformerConfig } from './config.ts'
import { rotaryTables } from './rotary-tables.ts'

/** What the transformer predicts from; all but the ids is cast to its dtype. */
export interface Flux2TransformerInputs {
  /** Packed latents `[batch, imageTokens, inChannels]`. */
  readonly hiddenStates: Tensor
  /** Prompt embeddings `[batch, textTokens, jointAttentionDim]`. */
  readonly encoderHiddenStates: Tensor
  /** Noise level in [0, 1], `[batch]`. */
  readonly timestep: Tensor
  /** (T, H, W, L) of every image token, int32 `[imageTokens, 4]`. */
  readonly imgIds: Tensor
  /** (T, H, W, L) of every text token, int32 `[textTokens, 4]`. */
  readonly txtIds: Tensor
  /** Guidance scale `[batch]`; only for models that embed it. */
  readonly guidance?: Tensor | undefined
}

/** What the first step with reference images predicts from. */
export interface Flux2ReferenceInputs extends Flux2TransformerInputs {
  /** How many of the first image tokens are those of references. */
  readonly referenceTokens: number
}

/** Sizes at which the transformer is traced. */
export interface Flux2TraceSizes {
  readonly imageTokens: number
  readonly textTokens: number
  /** @default 1 */
  readonly batch?: number
  /** What the model computes in. @default 'float32' */
  readonly dtype?: DType
}

/** What a graph of the transformer takes, by diffusers' names. */
export type GraphInputs<T> = {
  readonly hidden_states: T
  readonly encoder_hidden_states: T
  readonly timestep: T
  readonly rotary_cos: T
  readonly rotary_sin: T
  readonly guidance?: T
}

/** Concrete inputs of a graph. Rotary tables stay in float32 whatever the dtype, as in diffusers. */
export function graphInputs(
  inputs: Flux2TransformerInputs,
  { axesDimsRope, ropeTheta }: Flux2TransformerConfig,
  dtype: DType,
): GraphInputs<Tensor> {
  const { hiddenStates, encoderHiddenStates, timestep, guidance } = inputs
  const { cos, sin } = rotaryTables(joinIds(inputs.txtIds, inputs.imgIds), axesDimsRope, ropeTheta)
  return {
    hidden_states: hiddenStates.cast(dtype),
    encoder_hidden_states: encoderHiddenStates.cast(dtype),
    timestep: timestep.cast(dtype),
    rotary_cos: cos,
    rotary_sin: sin,
    ...(guidance === undefined ? {} : { guidance: guidance.cast(dtype) }),
  }
}

/** Types of the inputs of a graph at given sizes. */
export function graphInputTypes(
  { imageTokens, textTokens, batch = 1 }: Flux2TraceSizes,
  { inChannels, jointAttentionDim, attentionHeadDim, guidanceEmbeds }: Flux2TransformerConfig,
  dtype: DType,
): GraphInputs<TensorType> {
  const typed = (...shape: number[]) => ({ dtype, shape })
  const table = { dtype: 'float32', shape: [textTokens + imageTokens, attentionHeadDim / 2] } as const
  return {
    hidden_states: typed(batch, imageTokens, inChannels),
    encoder_hidden_states: typed(batch, textTokens, jointAttentionDim),
    timestep: typed(batch),
    rotary_cos: table,
    rotary_sin: table,
    ...(guidanceEmbeds ? { guidance: typed(batch) } : {}),
  }
}

/** @throws RankwiseError `TRANSFORMER_INPUT` */
export function requireInputs(inputs: Flux2TransformerInputs, config: Flux2TransformerConfig): void {
  const { hiddenStates, encoderHiddenStates, timestep, imgIds, txtIds, guidance } = inputs
  const [batch, imageTokens] = hiddenStates.shape
  const textTokens = encoderHiddenStates.shape[1]
  const { inChannels, jointAttentionDim, guidanceEmbeds } = config
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

/** @throws RankwiseError `TRANSFORMER_INPUT` */
export function requireReferences({ referenceTokens, hiddenStates }: Flux2ReferenceInputs): void {
  const imageTokens = hiddenStates.shape[1] as number
  if (Number.isInteger(referenceTokens) && referenceTokens > 0 && referenceTokens < imageTokens) return
  throw new RankwiseError('TRANSFORMER_INPUT', 'there are not as many reference tokens', {
    where: 'referenceTokens',
    actual: { referenceTokens, imageTokens },
    rule: 'at least one image token is of a reference, and at least one is not',
  })
}

/** Position ids of text tokens, then image tokens. */
function joinIds(txtIds: Tensor, imgIds: Tensor): Tensor<'int32'> {
  const ids = Int32Array.from([...txtIds.data, ...imgIds.data], Number)
  return Tensor.int32([(txtIds.shape[0] as number) + (imgIds.shape[0] as number), 4], ids)
}
