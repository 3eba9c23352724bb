import { RankwiseError } from '@rankwise/core'
import type { z } from 'zod'

/** Where `fromPretrained` looks inside a pipeline folder. */
export interface SubfolderOptions {
  /** Folder below the given one: `'tokenizer'`. @default the folder itself */
  readonly subfolder?: string
}

/**
 * Validates a config.
 *
 * @param where file or class that the message names
 * @throws RankwiseError `CONFIG_INVALID` naming every field that is wrong
 */
export function parseWith<T>(schema: z.ZodType<T>, value: unknown, where: string): T {
  const result = schema.safeParse(value)
  if (result.success) return result.data
  throw new RankwiseError('CONFIG_INVALID', 'the config does not have the expected form', {
    where,
    rule: result.error.issues.map((issue) => `${issue.path.join('.') || 'config'}: ${issue.message}`).join('; '),
    cause: result.error,
  })
}

/**
 * The options of a diffusers config under camelCase names: `num_train_timesteps` becomes `numTrainTimesteps`. Keys that
 * start with `_` (`_class_name`) say where the file comes from and are left out.
 *
 * @throws RankwiseError `CONFIG_INVALID` when the config is not an object
 */
export function camelizeConfig(config: unknown): Record<string, unknown> {
  if (typeof config !== 'object' || config === null || Array.isArray(config)) {
    throw new RankwiseError('CONFIG_INVALID', 'the config is not an object', {
      rule: 'a config is a JSON object of named options',
    })
  }
  const options = Object.entries(config).filter(([key]) => !key.startsWith('_'))
  return Object.fromEntries(
    options.map(([key, value]) => [key.replace(/_+([a-z0-9])/g, (_, letter: string) => letter.toUpperCase()), value]),
  )
}
