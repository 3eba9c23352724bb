import { Tensor } from '@rankwise/core'
import { prepareLatentIds, prepareTextIds } from '@rankwise/diffusion'
import type { Flux2Transformer2DModel, Flux2TransformerInputs } from '@rankwise/models-flux2'
import { randomTensor } from '../backends/random.ts'
import type { StepCase } from './job.ts'

/** What a step predicts from: noise of mean 0 and deviation 1, in the dtype that is computed in. */
export function stepInputs(
  { inChannels, jointAttentionDim }: Flux2Transformer2DModel['config'],
  { tokens, dtype }: Pick<StepCase, 'tokens' | 'dtype'>,
): Flux2TransformerInputs {
  const side = Math.sqrt(tokens.image)
  const random = (name: string, count: number, width: number) =>
    randomTensor(name, [1, count, width], { mean: 0, deviation: 1 }).cast(dtype)
  return {
    hiddenStates: random('hidden_states', tokens.image, inChannels),
    encoderHiddenStates: random('encoder_hidden_states', tokens.text, jointAttentionDim),
    timestep: Tensor.float32([1], [0.5]).cast(dtype),
    imgIds: prepareLatentIds(side, side),
    txtIds: prepareTextIds(tokens.text),
  }
}
