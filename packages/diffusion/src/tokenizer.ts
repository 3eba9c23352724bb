import { readFile } from 'node:fs/promises'
import { join } from 'node:path'
import { Template } from '@huggingface/jinja'
import { Tokenizer as HuggingFaceTokenizer } from '@huggingface/tokenizers'
import { RankwiseError, readConfig } from '@rankwise/core'
import { z } from 'zod'
import { parseWith, type SubfolderOptions } from './config.ts'

const VOCABULARY_FILE = 'tokenizer.json'
const CONFIG_FILE = 'tokenizer_config.json'
const TEMPLATE_FILE = 'chat_template.jinja'

/** One message of a chat. */
export interface ChatMessage {
  readonly role: string
  /** Text, or typed blocks of which the template picks what it knows. */
  readonly content: string | readonly ChatContentBlock[]
}

/** A part of a message. */
export interface ChatContentBlock {
  readonly type: string
  readonly text?: string
}

/** What a chat template may depend on. */
export interface ApplyChatTemplateOptions {
  /** End with the opening of the assistant's turn. @default false */
  readonly addGenerationPrompt?: boolean
  /** Qwen3: false closes the thinking block at once. Left out, the template does not see it. */
  readonly enableThinking?: boolean
}

/** Length and padding of the ids. */
export interface EncodeOptions {
  /** Longest result; what is longer is truncated on the config's `truncation_side`. @default no limit */
  readonly maxLength?: number
  /** `'max_length'` pads to `maxLength` on the config's `padding_side`. @default no padding */
  readonly padding?: 'max_length'
  /** Add the tokens that the checkpoint's post-processor puts around a text. @default true */
  readonly addSpecialTokens?: boolean
}

/** Token ids of one text. */
export interface TokenizedText {
  /** `[tokens]` */
  readonly inputIds: Int32Array
  /** `[tokens]`: 1 for a token, 0 for padding. */
  readonly attentionMask: Int32Array
  /** `[tokens]`: what was truncated, in the order of the text. */
  readonly overflowingTokens: Int32Array
}

const side = z.enum(['left', 'right']).default('right')
const specialToken = z
  .union([z.string(), z.object({ content: z.string() }).transform(({ content }) => content)])
  .nullish()
const namedTemplates = z.array(z.object({ name: z.string(), template: z.string() }))

/**
 * What we take from `tokenizer_config.json`. Some checkpoints carry the `max_length`, `stride` and padding arguments of
 * a former call; a call's own arguments decide here, so they are not read.
 */
const configSchema = z.looseObject({
  padding_side: side,
  truncation_side: side,
  pad_token: specialToken,
  bos_token: specialToken,
  eos_token: specialToken,
  unk_token: specialToken,
  chat_template: z.union([z.string(), namedTemplates]).nullish(),
})

/** Read and checked by the library; this much tells a tokenizer.json from another JSON file. */
const vocabularySchema = z.looseObject({ model: z.looseObject({}) })

type TokenizerConfig = z.output<typeof configSchema>

/** What we use of the library's class, whose own declarations do not resolve under Node's module resolution. */
interface Encoder {
  encode(text: string, options?: { add_special_tokens?: boolean }): { readonly ids: readonly number[] }
  decode(ids: readonly number[], options?: { skip_special_tokens?: boolean }): string
  token_to_id(token: string): number | undefined
}

/** Tokens that the post-processor puts before and after every text. */
interface Surroundings {
  readonly prefix: readonly number[]
  readonly suffix: readonly number[]
}

/**
 * Text to token ids by a checkpoint's own files, as the tokenizer classes of transformers do it. Truncation and padding
 * are what the call says.
 */
export class Tokenizer {
  /** Id of the padding token; undefined when the checkpoint names none. */
  readonly padTokenId: number | undefined
  /** @default 'right' when the checkpoint does not say */
  readonly paddingSide: 'left' | 'right'
  readonly #encoder: Encoder
  readonly #config: TokenizerConfig
  readonly #template: Template | undefined
  readonly #surroundings: Surroundings

  private constructor(encoder: Encoder, config: TokenizerConfig, template: Template | undefined, where: string) {
    this.#encoder = encoder
    this.#config = config
    this.#template = template
    this.#surroundings = surroundingsOf(encoder)
    this.paddingSide = config.padding_side
    this.padTokenId = padTokenIdOf(encoder, config, where)
  }

  /**
   * Reads `tokenizer.json`, `tokenizer_config.json` and the chat template, which is `chat_template.jinja` or else the
   * `chat_template` in `tokenizer_config.json`; a checkpoint may have none.
   *
   * @throws RankwiseError `CONFIG_NOT_FOUND`, `CONFIG_INVALID`, `TOKENIZER_PAD_TOKEN` when the padding
   *   token is not in the vocabulary
   */
  static async fromPretrained(directory: string, { subfolder = '' }: SubfolderOptions = {}): Promise<Tokenizer> {
    const folder = join(directory, subfolder)
    const vocabularyPath = join(folder, VOCABULARY_FILE)
    const configPath = join(folder, CONFIG_FILE)
    const templatePath = join(folder, TEMPLATE_FILE)
    const [rawVocabulary, rawConfig, templateFile] = await Promise.all([
      readConfig(folder, VOCABULARY_FILE),
      readConfig(folder, CONFIG_FILE),
      readOptionalText(templatePath),
    ])
    const vocabulary = parseWith(vocabularySchema, rawVocabulary, vocabularyPath)
    const config = parseWith(configSchema, rawConfig, configPath)
    const encoder: Encoder = invalidUnlessBuilt(vocabularyPath, () => new HuggingFaceTokenizer(vocabulary, config))
    const source = templateFile ?? defaultTemplate(config)
    const where = templateFile === undefined ? configPath : templatePath
    const template = source === undefined ? undefined : invalidUnlessBuilt(where, () => new Template(source))
    return new Tokenizer(encoder, config, template, configPath)
  }

  /**
   * Renders a chat with the checkpoint's template.
   *
   * @throws RankwiseError `TOKENIZER_CHAT_TEMPLATE` when the checkpoint has none or it does not accept the messages
   */
  applyChatTemplate(
    messages: readonly ChatMessage[],
    { addGenerationPrompt = false, enableThinking }: ApplyChatTemplateOptions = {},
  ): string {
    if (this.#template === undefined) {
      throw new RankwiseError('TOKENIZER_CHAT_TEMPLATE', 'the checkpoint has no chat template', {
        remedy: 'put chat_template.jinja beside tokenizer.json',
      })
    }
    const { bos_token, eos_token, pad_token, unk_token } = this.#config
    try {
      return this.#template.render({
        messages,
        tools: null,
        documents: null,
        add_generation_prompt: addGenerationPrompt,
        ...present({ bos_token, eos_token, pad_token, unk_token, enable_thinking: enableThinking }),
      })
    } catch (cause) {
      throw new RankwiseError('TOKENIZER_CHAT_TEMPLATE', 'the chat template does not accept the messages', {
        actual: { roles: messages.map(({ role }) => role) },
        rule: cause instanceof Error ? cause.message : String(cause),
        cause,
      })
    }
  }

  /**
   * Token ids of a text. Names of special tokens inside it (`<|im_end|>`) become those tokens, as in transformers.
   *
   * @throws RankwiseError `TOKENIZER_LENGTH` when `maxLength` leaves no room for a token of the text or is missing for
   *   padding; `TOKENIZER_PAD_TOKEN` when the checkpoint names no padding token
   */
  encode(text: string, { maxLength, padding, addSpecialTokens = true }: EncodeOptions = {}): TokenizedText {
    const { prefix, suffix } = addSpecialTokens ? this.#surroundings : { prefix: [], suffix: [] }
    const room = roomFor(maxLength, prefix.length + suffix.length)
    const { body, overflow } = this.#truncate(this.#encoder.encode(text, { add_special_tokens: false }).ids, room)
    const ids = [...prefix, ...body, ...suffix]
    const overflowingTokens = Int32Array.from(overflow)
    if (padding !== undefined) return { ...this.#pad(ids, maxLength), overflowingTokens }
    return { inputIds: Int32Array.from(ids), attentionMask: new Int32Array(ids.length).fill(1), overflowingTokens }
  }

  /** The text of token ids; special tokens are left out. */
  decode(ids: Int32Array): string {
    return ids.length === 0 ? '' : this.#encoder.decode([...ids], { skip_special_tokens: true })
  }

  #truncate(ids: readonly number[], room: number): Readonly<Record<'body' | 'overflow', readonly number[]>> {
    if (ids.length <= room) return { body: ids, overflow: [] }
    const isRight = this.#config.truncation_side === 'right'
    const cut = isRight ? room : ids.length - room
    const [start, end] = [ids.slice(0, cut), ids.slice(cut)]
    return isRight ? { body: start, overflow: end } : { body: end, overflow: start }
  }

  #pad(ids: readonly number[], maxLength: number | undefined): Omit<TokenizedText, 'overflowingTokens'> {
    if (maxLength === undefined) {
      throw new RankwiseError('TOKENIZER_LENGTH', 'padding to max_length needs a maxLength', {
        rule: "padding 'max_length' comes with maxLength",
      })
    }
    if (this.padTokenId === undefined) {
      throw new RankwiseError('TOKENIZER_PAD_TOKEN', 'the checkpoint names no padding token', {
        rule: 'pad_token in tokenizer_config.json names a token of the vocabulary',
      })
    }
    const start = this.paddingSide === 'right' ? 0 : maxLength - ids.length
    const inputIds = new Int32Array(maxLength).fill(this.padTokenId)
    inputIds.set(ids, start)
    const attentionMask = new Int32Array(maxLength).fill(1, start, start + ids.length)
    return { inputIds, attentionMask }
  }
}

/** The text of a file, or `undefined` where there is none. */
async function readOptionalText(path: string): Promise<string | undefined> {
  try {
    return await readFile(path, 'utf8')
  } catch (cause) {
    if (cause instanceof Error && 'code' in cause && cause.code === 'ENOENT') return undefined
    throw new RankwiseError('CONFIG_NOT_FOUND', `${TEMPLATE_FILE} cannot be read`, { where: path, cause })
  }
}

/** Encodes a probe with and without special tokens; what is added is the same for every text. */
function surroundingsOf(encoder: Encoder): Surroundings {
  const probe = 'a'
  const bare = encoder.encode(probe, { add_special_tokens: false }).ids
  const full = encoder.encode(probe).ids
  const added = full.length - bare.length
  const start =
    Array.from({ length: added + 1 }, (_, i) => i).find((i) => bare.every((id, j) => full[i + j] === id)) ?? 0
  return { prefix: full.slice(0, start), suffix: full.slice(start + bare.length) }
}

function padTokenIdOf(encoder: Encoder, { pad_token: name }: TokenizerConfig, where: string): number | undefined {
  if (name === undefined || name === null) return undefined
  const id = encoder.token_to_id(name)
  if (id === undefined) {
    throw new RankwiseError('TOKENIZER_PAD_TOKEN', 'the padding token is not in the vocabulary', {
      where,
      actual: { pad_token: name },
      rule: 'pad_token names a token of tokenizer.json',
    })
  }
  return id
}

/** Tokens of the text that fit beside the `added` special tokens. */
function roomFor(maxLength: number | undefined, added: number): number {
  if (maxLength === undefined) return Number.POSITIVE_INFINITY
  const room = maxLength - added
  if (!Number.isSafeInteger(maxLength) || room < 1) {
    throw new RankwiseError('TOKENIZER_LENGTH', 'maxLength leaves no room for text', {
      actual: { maxLength, specialTokens: added },
      rule: 'maxLength is an integer greater than the number of special tokens',
    })
  }
  return room
}

function defaultTemplate({ chat_template: template }: TokenizerConfig): string | undefined {
  if (template === null || template === undefined || typeof template === 'string') return template ?? undefined
  return template.find(({ name }) => name === 'default')?.template
}

function invalidUnlessBuilt<T>(where: string, build: () => T): T {
  try {
    return build()
  } catch (cause) {
    throw new RankwiseError('CONFIG_INVALID', 'the tokenizer file cannot be used', {
      where,
      rule: cause instanceof Error ? cause.message : String(cause),
      cause,
    })
  }
}

/** The entries that have a value: a template can tell an undefined variable from a null one. */
function present(variables: Readonly<Record<string, unknown>>): Record<string, unknown> {
  return Object.fromEntries(Object.entries(variables).filter(([, value]) => value !== undefined && value !== null))
}
