import { type PlacedGraph, partition, resolvePlan, type TensorType, type TracedTensor, trace } from '@rankwise/core'
import { Flux2Transformer2DModel, FullAttention, flux2Plan } from '@rankwise/models-flux2'
import type { Flux2Config } from '../klein-config.ts'
import type { BlockCase } from './job.ts'

/** Text tokens of all tokens: 512, which FLUX.2 pads prompts to, of the 1536 of a picture of 512 x 512. */
export function textTokensOf(tokens: number): number {
  return tokens / 3
}

/** What a block takes, by the names that diffusers gives its arguments; the rotary tables are `[tokens, headDim / 2]`. */
export function inputTypes(config: Flux2Config, { block, tokens }: BlockCase): Readonly<Record<string, TensorType>> {
  const dim = config.num_attention_heads * config.attention_head_dim
  const float32 = (...shape: number[]): TensorType => ({ dtype: 'float32', shape })
  const text = textTokensOf(tokens)
  const rotary = float32(tokens, config.attention_head_dim / 2)
  const tables = { rotary_cos: rotary, rotary_sin: rotary }
  if (block === 'single') return { hidden_states: float32(1, tokens, dim), temb_mod: float32(1, 1, 3 * dim), ...tables }
  return {
    hidden_states: float32(1, tokens - text, dim),
    encoder_hidden_states: float32(1, text, dim),
    temb_mod_img: float32(1, 1, 6 * dim),
    temb_mod_txt: float32(1, 1, 6 * dim),
    ...tables,
  }
}

/** The graph of a block of the transformer, split as the transformer's plan says. */
export function blockGraph(config: Flux2Config, blockCase: BlockCase): PlacedGraph {
  const model = Flux2Transformer2DModel.fromConfig(config)
  const forward = blockCase.block === 'single' ? singleBlock : doubleBlock
  const graph = trace(blockCase.block, model, inputTypes(config, blockCase), (inputs) => forward(model, inputs))
  return partition(graph, resolvePlan(model, flux2Plan), blockCase.tp)
}

type Traced = Readonly<Record<string, TracedTensor>>

function singleBlock(model: Flux2Transformer2DModel, inputs: Traced): Traced {
  const { hidden_states, temb_mod } = inputs as Record<'hidden_states' | 'temb_mod', TracedTensor>
  const [modulation] = modulations(temb_mod, 1) as [ReturnType<typeof modulations>[0]]
  return { hidden_states: model.single_transformer_blocks.at(0).call(hidden_states, modulation, contextOf(inputs)) }
}

function doubleBlock(model: Flux2Transformer2DModel, inputs: Traced): Traced {
  const { image, text } = model.transformer_blocks
    .at(0)
    .call(
      { image: inputs.hidden_states as TracedTensor, text: inputs.encoder_hidden_states as TracedTensor },
      modulations(inputs.temb_mod_img as TracedTensor, 2),
      modulations(inputs.temb_mod_txt as TracedTensor, 2),
      contextOf(inputs),
    )
  return { hidden_states: image, encoder_hidden_states: text }
}

function modulations(packed: TracedTensor, sets: number) {
  const parts = packed.chunk(3 * sets, -1)
  return Array.from({ length: sets }, (_, i) => {
    const [shift, scale, gate] = parts.slice(3 * i, 3 * i + 3) as [TracedTensor, TracedTensor, TracedTensor]
    return { shift, scale, gate }
  })
}

function contextOf({ rotary_cos, rotary_sin }: Traced) {
  return { cos: rotary_cos as TracedTensor, sin: rotary_sin as TracedTensor, tokens: new FullAttention() }
}
