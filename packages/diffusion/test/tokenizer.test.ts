import { copyFile, mkdtemp, readFile, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { referencePath } from '@rankwise/fixtures'
import fc from 'fast-check'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { Tokenizer } from '../src/tokenizer.ts'
import { codeOf, goldenJson } from './support.ts'

interface TextGoldens {
  readonly prompts: string[]
  readonly rendered: string[]
  readonly pad_token_id: number
  readonly padding_side: string
  readonly cases: Record<string, { token_ids_unpadded: number[][]; pad_right: number[] }>
}

const FILES = ['tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja'] as const
type FileName = (typeof FILES)[number]
type Json = Record<string, unknown>

const IM_START = 1001
const IM_END = 1002
const chat = (prompt: string) => [{ role: 'user', content: prompt }]
const pipelineOptions = { addGenerationPrompt: true, enableThinking: false }

let goldens: TextGoldens
let tokenizer: Tokenizer
beforeAll(async () => {
  goldens = await goldenJson('text', 'flux2-klein-tiny.json')
  tokenizer = await Tokenizer.fromPretrained(referencePath('flux2-klein-tiny'), { subfolder: 'tokenizer' })
})

const folders: string[] = []
afterAll(() => Promise.all(folders.map((folder) => rm(folder, { recursive: true }))))

/** The fixture's tokenizer with some of its files edited; `undefined` removes a file. */
async function edited(edits: Partial<Record<FileName, (file: Json) => Json | string | undefined>>): Promise<Tokenizer> {
  const folder = await mkdtemp(join(tmpdir(), 'rankwise-tokenizer-'))
  folders.push(folder)
  for (const name of FILES) {
    const source = referencePath('flux2-klein-tiny', 'tokenizer', name)
    const edit = edits[name]
    if (edit === undefined) await copyFile(source, join(folder, name))
    else {
      const result = edit(name.endsWith('.json') ? JSON.parse(await readFile(source, 'utf8')) : {})
      if (result !== undefined)
        await writeFile(join(folder, name), typeof result === 'string' ? result : JSON.stringify(result))
    }
  }
  return Tokenizer.fromPretrained(folder)
}

const withConfig = (changes: Json) => edited({ 'tokenizer_config.json': (config) => ({ ...config, ...changes }) })

describe('the prompts of FLUX.2-klein', () => {
  it('render as in transformers', () => {
    expect(goldens.prompts.map((prompt) => tokenizer.applyChatTemplate(chat(prompt), pipelineOptions))).toEqual(
      goldens.rendered,
    )
  })

  it.each(['512', '128'])('become the ids of transformers at %s tokens', (length) => {
    const { token_ids_unpadded: expected, pad_right: padding } = goldens.cases[length] as TextGoldens['cases'][string]
    const maxLength = Number(length)
    for (const [i, text] of goldens.rendered.entries()) {
      const { inputIds, attentionMask } = tokenizer.encode(text, { maxLength, padding: 'max_length' })
      const pads = padding[i] as number
      expect([...inputIds], goldens.prompts[i]).toEqual([
        ...(expected[i] as number[]),
        ...new Array(pads).fill(goldens.pad_token_id),
      ])
      expect([...attentionMask]).toEqual([...new Array(maxLength - pads).fill(1), ...new Array(pads).fill(0)])
    }
  })

  it('can fail: without the thinking block, or left in another normal form, they differ', async () => {
    const { rendered, cases } = goldens
    expect(tokenizer.applyChatTemplate(chat(goldens.prompts[0] as string), { addGenerationPrompt: true })).not.toBe(
      rendered[0],
    )
    const unnormalized = await edited({ 'tokenizer.json': (file) => ({ ...file, normalizer: null }) })
    const { inputIds } = unnormalized.encode(rendered[1] as string, { maxLength: 512 })
    expect([...inputIds]).not.toEqual(cases['512']?.token_ids_unpadded[1])
  })

  it('take padding from the checkpoint', () => {
    expect(tokenizer.padTokenId).toBe(goldens.pad_token_id)
    expect(tokenizer.paddingSide).toBe(goldens.padding_side)
  })
})

describe('encode', () => {
  const full = (text: string) => [...tokenizer.encode(text).inputIds]

  it('neither truncates nor pads unless asked to', () => {
    const { inputIds, attentionMask } = tokenizer.encode(goldens.rendered[2] as string)
    expect(inputIds.length).toBeGreaterThan(512)
    expect(attentionMask).toEqual(new Int32Array(inputIds.length).fill(1))
  })

  it('keeps the first tokens and pads to the length, whatever the text', () => {
    fc.assert(
      fc.property(
        fc.string({ unit: 'grapheme', maxLength: 40 }),
        fc.integer({ min: 1, max: 50 }),
        (text, maxLength) => {
          const { inputIds, attentionMask, overflowingTokens } = tokenizer.encode(text, {
            maxLength,
            padding: 'max_length',
          })
          const kept = full(text).slice(0, maxLength)
          expect([...overflowingTokens]).toEqual(full(text).slice(maxLength))
          const pads = maxLength - kept.length
          expect([...inputIds]).toEqual([...kept, ...new Array(pads).fill(goldens.pad_token_id)])
          expect([...attentionMask]).toEqual([...kept.map(() => 1), ...new Array(pads).fill(0)])
        },
      ),
    )
  })

  it('goes by the call, not by the arguments of a former one that the files carry', async () => {
    const stale = await edited({
      'tokenizer.json': (file) => ({
        ...file,
        truncation: { direction: 'Right', max_length: 8, strategy: 'LongestFirst', stride: 0 },
        padding: { strategy: { Fixed: 8 }, direction: 'Left', pad_id: 3, pad_token: 'x', pad_type_id: 0 },
      }),
      'tokenizer_config.json': (config) => ({
        ...config,
        max_length: 8,
        truncation_strategy: 'longest_first',
        stride: 0,
      }),
    })
    for (const text of goldens.rendered) {
      const options = { maxLength: 128, padding: 'max_length' } as const
      expect(stale.encode(text, options)).toEqual(tokenizer.encode(text, options))
      expect(stale.encode(text)).toEqual(tokenizer.encode(text))
    }
  })

  it('pads and truncates on the left where the checkpoint says so', async () => {
    const left = await withConfig({ padding_side: 'left', truncation_side: 'left' })
    const ids = full('a photo of a cat')
    const padded = left.encode('a photo of a cat', { maxLength: ids.length + 2, padding: 'max_length' })
    expect([...padded.inputIds]).toEqual([goldens.pad_token_id, goldens.pad_token_id, ...ids])
    expect([...padded.attentionMask]).toEqual([0, 0, ...ids.map(() => 1)])
    const truncated = left.encode('a photo of a cat', { maxLength: 3 })
    expect([...truncated.inputIds]).toEqual(ids.slice(-3))
    expect([...truncated.overflowingTokens]).toEqual(ids.slice(0, -3))
  })

  it('keeps the special tokens around a text when it truncates', async () => {
    const surrounded = await edited({
      'tokenizer.json': (file) => ({
        ...file,
        post_processor: {
          type: 'TemplateProcessing',
          single: [special('<|im_start|>'), { Sequence: { id: 'A', type_id: 0 } }, special('<|im_end|>')],
          pair: [],
          special_tokens: { ...ids('<|im_start|>', IM_START), ...ids('<|im_end|>', IM_END) },
        },
      }),
    })
    const text = 'a photo of a cat'
    expect([...surrounded.encode(text).inputIds]).toEqual([IM_START, ...full(text), IM_END])
    expect([...surrounded.encode(text, { maxLength: 4 }).inputIds]).toEqual([
      IM_START,
      ...full(text).slice(0, 2),
      IM_END,
    ])
    expect([...surrounded.encode(text, { maxLength: 4, addSpecialTokens: false }).inputIds]).toEqual(
      full(text).slice(0, 4),
    )
    expect(await codeOf(() => surrounded.encode(text, { maxLength: 2 }))).toBe('TOKENIZER_LENGTH')
  })
  const special = (id: string) => ({ SpecialToken: { id, type_id: 0 } })
  const ids = (id: string, token: number) => ({ [id]: { id, ids: [token], tokens: [id] } })

  it.each([0, -1, 2.5, Number.NaN])('refuses a maxLength of %s', async (maxLength) => {
    expect(await codeOf(() => tokenizer.encode('a', { maxLength }))).toBe('TOKENIZER_LENGTH')
  })

  it('refuses to pad without a length or a padding token', async () => {
    expect(await codeOf(() => tokenizer.encode('a', { padding: 'max_length' }))).toBe('TOKENIZER_LENGTH')
    const padless = await withConfig({ pad_token: null })
    expect(padless.padTokenId).toBeUndefined()
    expect(await codeOf(() => padless.encode('a', { maxLength: 4, padding: 'max_length' }))).toBe('TOKENIZER_PAD_TOKEN')
  })
})

describe('decode', () => {
  it('gives back a text without its special tokens', () => {
    for (const text of ['a photo of a cat', '猫 and\n 🐱', '']) {
      expect(tokenizer.decode(tokenizer.encode(text).inputIds)).toBe(text)
    }
    expect(tokenizer.decode(tokenizer.encode('<|im_start|>user a cat<|im_end|>').inputIds)).toBe('user a cat')
  })
})

describe('applyChatTemplate', () => {
  const template =
    '{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ eos_token }}{{ bos_token is defined }}'

  it.each([
    ['the config', template],
    ['a named template of the config', [{ name: 'default', template }]],
  ])('takes the template of %s where there is no file', async (_, source) => {
    const own = await edited({
      'chat_template.jinja': () => undefined,
      'tokenizer_config.json': (config) => ({ ...config, chat_template: source, eos_token: { content: '<eos>' } }),
    })
    expect(own.applyChatTemplate(chat('hi'))).toBe('[user]hi<eos>false')
  })

  it('prefers the file', async () => {
    const own = await edited({
      'chat_template.jinja': () => '{{ messages[0].content[0].text }}!',
      'tokenizer_config.json': (config) => ({ ...config, chat_template: template }),
    })
    expect(own.applyChatTemplate([{ role: 'user', content: [{ type: 'text', text: 'hi' }] }])).toBe('hi!')
  })

  it('refuses when there is no template or the template refuses', async () => {
    const none = await edited({ 'chat_template.jinja': () => undefined })
    expect(await codeOf(() => none.applyChatTemplate(chat('hi')))).toBe('TOKENIZER_CHAT_TEMPLATE')
    const strict = await edited({ 'chat_template.jinja': () => "{{ raise_exception('only system messages') }}" })
    expect(await codeOf(() => strict.applyChatTemplate(chat('hi')))).toBe('TOKENIZER_CHAT_TEMPLATE')
  })
})

describe('fromPretrained', () => {
  it('refuses a folder without tokenizer files', async () => {
    expect(await codeOf(() => Tokenizer.fromPretrained(referencePath('flux2-klein-tiny')))).toBe('CONFIG_NOT_FOUND')
    expect(await codeOf(() => edited({ 'tokenizer.json': () => undefined }))).toBe('CONFIG_NOT_FOUND')
    expect(await codeOf(() => edited({ 'tokenizer_config.json': () => undefined }))).toBe('CONFIG_NOT_FOUND')
  })

  it.each<[string, Partial<Record<FileName, (file: Json) => Json | string>>]>([
    ['a tokenizer.json that is not JSON', { 'tokenizer.json': () => '{' }],
    ['a tokenizer.json of another kind', { 'tokenizer.json': () => ({ version: '1.0' }) }],
    ['an unknown kind of model', { 'tokenizer.json': (file) => ({ ...file, model: { type: 'Magic' } }) }],
    ['a padding side that is no side', { 'tokenizer_config.json': (config) => ({ ...config, padding_side: 'up' }) }],
    ['a template that is no Jinja', { 'chat_template.jinja': () => '{% for %}' }],
  ])('refuses %s', async (_, edits) => {
    expect(await codeOf(() => edited(edits))).toBe('CONFIG_INVALID')
  })

  it('refuses a padding token that the vocabulary lacks', async () => {
    expect(await codeOf(() => withConfig({ pad_token: '<nowhere>' }))).toBe('TOKENIZER_PAD_TOKEN')
  })
})
