import { jsonOf, RankwiseError } from '@rankwise/core'
import type { z } from 'zod'
import { camelizeConfig, parseWith } from './config.ts'

/**
 * The `config.json` of a model, validated and under camelCase names.
 *
 * @param schema - of the fields by their camelCase names; a literal stands for a field of which only that value is
 *   implemented
 * @param className - the model class, which a `_class_name` in the config has to name
 * @throws RankwiseError `CONFIG_UNSUPPORTED` naming every value that is not implemented, `CONFIG_INVALID` naming every
 *   field that is wrong
 */
export function parseModelConfig<T>(schema: z.ZodType<T>, config: unknown, className: string): T {
  const options = camelizeConfig(config)
  requireClass(config as Readonly<Record<string, unknown>>, className)
  const issues = schema.safeParse(options, { reportInput: true }).error?.issues ?? []
  const unsupported = issues.filter((issue) => issue.code === 'invalid_value')
  if (unsupported.length > 0) {
    throw new RankwiseError('CONFIG_UNSUPPORTED', 'the config asks for what the model class does not implement', {
      where: className,
      actual: Object.fromEntries(unsupported.map(({ path, input }) => [path.join('.'), jsonOf(input)])),
      rule: unsupported.map(({ path, values }) => `${path.join('.')} is ${values.join(' or ')}`).join('; '),
    })
  }
  return parseWith(schema, options, className)
}

/** Another class's config may have the same fields and mean another computation. */
function requireClass(config: Readonly<Record<string, unknown>>, className: string): void {
  const { _class_name: named = className } = config
  if (named === className) return
  throw new RankwiseError('CONFIG_UNSUPPORTED', 'the config belongs to another class', {
    where: className,
    actual: { _class_name: named },
    rule: `_class_name is ${className}`,
  })
}
