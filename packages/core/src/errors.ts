import { textOf } from './value-text.ts'

/** What an error says beside its message. Every field is optional; the message is built from them. */
export interface RankwiseErrorDetails {
  /** Module path (`transformer_blocks.0.attn.to_q`), tensor name or file the error is about. */
  readonly where?: string
  /** The actual values: shapes, sizes, degrees, ranks. */
  readonly actual?: Readonly<Record<string, unknown>>
  /** The rule that was broken. */
  readonly rule?: string
  /** What the reader can do about it. */
  readonly remedy?: string
  readonly cause?: unknown
}

/**
 * Base class of every error that Rankwise throws on purpose. Match on `code`: it is stable across releases, the text
 * is not.
 */
export class RankwiseError extends Error {
  readonly code: string
  readonly where: string | undefined
  readonly actual: Readonly<Record<string, unknown>>
  readonly rule: string | undefined
  readonly remedy: string | undefined

  constructor(code: string, what: string, details: RankwiseErrorDetails = {}) {
    super(describe(code, what, details), { cause: details.cause })
    this.name = 'RankwiseError'
    this.code = code
    this.where = details.where
    this.actual = details.actual ?? {}
    this.rule = details.rule
    this.remedy = details.remedy
  }
}

function describe(code: string, what: string, { where, actual, rule, remedy }: RankwiseErrorDetails): string {
  const numbers = Object.entries(actual ?? {}).map(([name, value]) => `${name} ${textOf(value)}`)
  return [
    `[${code}] ${where === undefined ? '' : `${where}: `}${what}`,
    numbers.length > 0 ? `  actual: ${numbers.join(', ')}` : undefined,
    rule === undefined ? undefined : `  rule: ${rule}`,
    remedy === undefined ? undefined : `  remedy: ${remedy}`,
  ]
    .filter((line) => line !== undefined)
    .join('\n')
}
