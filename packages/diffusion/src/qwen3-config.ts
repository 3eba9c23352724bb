import { z } from 'zod'
import { checkDecoder, type DecoderConfig, decoderConfig, decoderFields } from './decoder/config.ts'
import { parseModelConfig } from './model-config.ts'

const schema = z
  .object({
    ...decoderFields,
    modelType: z.literal('qwen3').default('qwen3'),
    headDim: z.int().positive().default(128),
    attentionBias: z.literal(false).default(false),
    useSlidingWindow: z.literal(false).default(false),
    layerTypes: z.array(z.literal('full_attention')).nullish(),
  })
  .superRefine(checkDecoder)

/**
 * The config in a `config.json` of transformers.
 *
 * @throws RankwiseError `CONFIG_INVALID`; `CONFIG_UNSUPPORTED` for sliding windows, biases, other activations and
 *   scaled rotary frequencies
 */
export function parseQwen3Config(config: unknown): DecoderConfig {
  return { ...decoderConfig(parseModelConfig(schema, config, 'Qwen3ForCausalLM')), normalizesHeads: true }
}
