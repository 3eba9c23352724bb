import { Tensor } from '@rankwise/core'
import type { GoldenTensors } from '@rankwise/fixtures'
import type { Flux2TransformerInputs } from '../src/index.ts'

/** The arguments that a transformer golden was computed with. */
export function transformerInputs(golden: GoldenTensors, guidanceEmbeds: boolean): Flux2TransformerInputs {
  return {
    hiddenStates: golden.get('in.hidden_states'),
    encoderHiddenStates: golden.get('in.encoder_hidden_states'),
    timestep: golden.get('in.timestep'),
    imgIds: firstOfBatch(golden.get('in.img_ids')),
    txtIds: firstOfBatch(golden.get('in.txt_ids')),
    ...(guidanceEmbeds ? { guidance: golden.get('in.guidance') } : {}),
  }
}

/** Goldens repeat the position ids for every picture; the model takes them once. */
function firstOfBatch(ids: Tensor): Tensor<'int32'> {
  const [, tokens, axes] = ids.shape as readonly [number, number, number]
  return new Tensor('int32', [tokens, axes], ids.cast('int32').data.slice(0, tokens * axes))
}
