import { RankwiseError } from '../errors.ts'

export interface StrictJsonOptions {
  /** The file the text comes from. */
  readonly where: string
  /** Code of the error for text that is not JSON, or is nested too deeply. */
  readonly syntaxCode: string
  /** Code of the error for an object that repeats a key. */
  readonly duplicateCode: string
  /** Deepest nesting of objects and arrays; a hostile file nests to exhaust memory. */
  readonly maxDepth: number
}

/**
 * `JSON.parse` that refuses two things `JSON.parse` lets pass: a repeated key, of which it silently keeps the last,
 * and endless nesting.
 *
 * @throws RankwiseError with the codes of the options
 */
export function parseStrictJson(text: string, options: StrictJsonOptions): unknown {
  try {
    checkStructure(text, options)
    return JSON.parse(text)
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error
    throw new RankwiseError(options.syntaxCode, 'not valid JSON', {
      where: options.where,
      // V8 quotes the text around the error, which may be long and hold control characters.
      actual: { problem: quoteName(error.message) },
      cause: error,
    })
  }
}

/**
 * A name from a file, fit for a message: control characters escaped and cut to 120 characters, because a hostile
 * header can hold a name of 100 MB.
 */
export function quoteName(name: string): string {
  return JSON.stringify(name.length > 120 ? `${name.slice(0, 120)}…` : name)
}

/** Walks the brackets and strings of the text. Text that is not JSON is left to `JSON.parse` to refuse. */
function checkStructure(text: string, options: StrictJsonOptions): void {
  const open: Set<string>[] = []
  for (let i = 0; i < text.length; i++) {
    const char = text[i]
    if (char === '{' || char === '[') {
      open.push(new Set())
      if (open.length > options.maxDepth) throw tooDeep(options)
    } else if (char === '}' || char === ']') {
      open.pop()
    } else if (char === '"') {
      const end = endOfString(text, i)
      if (isKey(text, end)) addKey(open.at(-1), JSON.parse(text.slice(i, end)), options)
      i = end - 1
    }
  }
}

/** Index after the closing quote of the string that starts at `start`. */
function endOfString(text: string, start: number): number {
  for (let quote = text.indexOf('"', start + 1); quote >= 0; quote = text.indexOf('"', quote + 1)) {
    let backslashes = 0
    while (text[quote - 1 - backslashes] === '\\') backslashes++
    if (backslashes % 2 === 0) return quote + 1
  }
  return text.length
}

/** Whether a colon follows: in JSON only keys have one. */
function isKey(text: string, end: number): boolean {
  let i = end
  while (text[i] === ' ' || text[i] === '\n' || text[i] === '\r' || text[i] === '\t') i++
  return text[i] === ':'
}

function addKey(keys: Set<string> | undefined, key: string, { where, duplicateCode }: StrictJsonOptions): void {
  if (keys === undefined) return
  if (keys.has(key)) {
    throw new RankwiseError(duplicateCode, `the key ${quoteName(key)} occurs twice in one object`, {
      where,
      rule: 'keys are unique, or it is open which of the values is meant',
    })
  }
  keys.add(key)
}

function tooDeep({ where, syntaxCode, maxDepth }: StrictJsonOptions): RankwiseError {
  return new RankwiseError(syntaxCode, 'nested too deeply', {
    where,
    rule: `objects and arrays nest at most ${maxDepth} deep`,
  })
}
