import { RankwiseError } from '../errors.ts'

export interface StrictJsonOptions {
  /** The file the text comes from. */
  readonly where: string
  /** Code of the error for text that is not JSON, is nested too deeply, or has too many parts. */
  readonly syntaxCode: string
  /** Code of the error for an object that repeats a key. */
  readonly duplicateCode: string
  /** Deepest nesting of objects and arrays; a hostile file nests to exhaust memory. */
  readonly maxDepth: number
}

/**
 * Most keys, commas and opening brackets together. A header spends 12 on a weight, so this is room for 160 000 weights
 * in one file, hundreds of times what FLUX.2 has. Parsing a text of this limit takes 1 to 3 s; without one, a header of
 * 100 MB that consists of tiny keys took minutes and 3 GB.
 */
const MAX_JSON_PARTS = 2_000_000

/**
 * `JSON.parse` that refuses three things `JSON.parse` lets pass: a repeated key, of which it silently keeps the last,
 * endless nesting, and texts of more than `MAX_JSON_PARTS`.
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

/** Whether a value is what `{…}` stands for. */
export function isJsonObject(value: unknown): value is Readonly<Record<string, unknown>> {
  return typeof value === 'object' && value !== null && !Array.isArray(value)
}

/** Walks the brackets and strings of the text. Text that is not JSON is left to `JSON.parse` to refuse. */
function checkStructure(text: string, options: StrictJsonOptions): void {
  const structure = new Structure(options)
  for (let i = 0; i < text.length; i++) {
    const char = text[i]
    if (char === '{' || char === '[') {
      structure.open(char)
    } else if (char === '}' || char === ']') {
      structure.close()
    } else if (char === ',') {
      structure.countPart()
    } else if (char === '"') {
      const end = endOfString(text, i)
      if (isKey(text, end)) structure.addKey(keyOf(text.slice(i, end)))
      i = end - 1
    }
  }
}

/** The objects and arrays around a place in the text, and how much came before it. */
class Structure {
  readonly #options: StrictJsonOptions
  /** The keys of every object that is open; none where an array is. */
  readonly #open: (Set<string> | undefined)[] = []
  #parts = 0

  constructor(options: StrictJsonOptions) {
    this.#options = options
  }

  open(bracket: '{' | '['): void {
    const { where, syntaxCode, maxDepth } = this.#options
    this.countPart()
    this.#open.push(bracket === '{' ? new Set() : undefined)
    if (this.#open.length <= maxDepth) return
    throw new RankwiseError(syntaxCode, 'nested too deeply', {
      where,
      rule: `objects and arrays nest at most ${maxDepth} deep`,
    })
  }

  close(): void {
    this.#open.pop()
  }

  addKey(key: string): void {
    const { where, duplicateCode } = this.#options
    this.countPart()
    const keys = this.#open.at(-1)
    if (keys?.has(key)) {
      throw new RankwiseError(duplicateCode, `the key ${quoteName(key)} occurs twice in one object`, {
        where,
        rule: 'keys are unique, or it is open which of the values is meant',
      })
    }
    keys?.add(key)
  }

  countPart(): void {
    const { where, syntaxCode } = this.#options
    this.#parts++
    if (this.#parts <= MAX_JSON_PARTS) return
    throw new RankwiseError(syntaxCode, 'too many keys and values', {
      where,
      rule: `at most ${MAX_JSON_PARTS} keys, commas and opening brackets`,
    })
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

/** The key that a string literal stands for. Only one with an escape needs parsing, which costs most of the time. */
function keyOf(literal: string): string {
  return literal.includes('\\') ? JSON.parse(literal) : literal.slice(1, -1)
}
