import { z } from 'zod'
import { checkDecoder, type DecoderConfig, decoderConfig, decoderFields } from './decoder/config.ts'
import { parseModelConfig } from './model-config.ts'

const CLASS_NAME = 'Mistral3ForConditionalGeneration'

const schema = z.looseObject({
  modelType: z.literal('mistral3').default('mistral3'),
  textConfig: z.record(z.string(), z.unknown()),
})

const textSchema = z
  .object({
    ...decoderFields,
    modelType: z.literal('mistral').default('mistral'),
    // What transformers takes where a config is silent; null has a meaning of its own.
    numKeyValueHeads: decoderFields.numKeyValueHeads.default(8),
    // A config that leaves it out means windows of 4096 tokens.
    slidingWindow: z.literal(null),
  })
  .superRefine(checkDecoder)

/**
 * The language model's config in a `config.json` of transformers; those of the vision tower and of the projector are not
 * looked at.
 *
 * @throws RankwiseError `CONFIG_INVALID`; `CONFIG_UNSUPPORTED` for other language models, sliding windows, other
 *   activations and scaled rotary frequencies
 */
export function parseMistral3Config(config: unknown): DecoderConfig {
  const { textConfig } = parseModelConfig(schema, config, CLASS_NAME)
  return { ...decoderConfig(parseModelConfig(textSchema, textConfig, CLASS_NAME)), normalizesHeads: false }
}
