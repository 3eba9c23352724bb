import { readFile } from 'node:fs/promises'
import { ort } from '@rankwise/backend-ort'
import type { Tensor } from '@rankwise/core'
import { Mistral3ForConditionalGeneration, Qwen3ForCausalLM, Tokenizer } from '@rankwise/diffusion'
import { expectClose, loadGolden, referencePath } from '@rankwise/fixtures'
import { beforeAll, describe, expect, it, onTestFinished } from 'vitest'
import type { PromptEncoder } from '../src/prompt.ts'
import { devMessages, encodeDevPrompt, SYSTEM_MESSAGE, tokenizeDevPrompt } from '../src/prompt-dev.ts'
import { encodeKleinPrompt } from '../src/prompt-klein.ts'

interface TextGolden {
  readonly system_message: string
  readonly prompts: readonly string[]
  readonly rendered: readonly string[]
  readonly pad_token_id: number
  readonly prompt_embeds_rows: Readonly<Record<string, readonly number[]>>
  readonly cases: Readonly<
    Record<string, { readonly token_ids_unpadded: readonly number[][]; readonly pad_left: number[] }>
  >
}

const TOLERANCE = { relativeRms: 5e-6 }
const LONG_PROMPT = 2

let dev: TextGolden
let tokenizer: Tokenizer
beforeAll(async () => {
  dev = await goldenOf('flux2-tiny')
  tokenizer = await Tokenizer.fromPretrained(referencePath('flux2-tiny'), { subfolder: 'tokenizer' })
})

async function goldenOf(pipeline: string): Promise<TextGolden> {
  return JSON.parse(await readFile(referencePath('goldens', 'text', `${pipeline}.json`), 'utf8'))
}

const common = { numImagesPerPrompt: 1, maxSequenceLength: 128 }
const devOptions = { ...common, textEncoderOutLayers: [10, 20, 30] }

/** Codes and messages of the warnings that the test emits from here on. */
function heardWarnings(): Error[] {
  const heard: Error[] = []
  const emit = process.emitWarning
  process.emitWarning = ((message: string, options: object) => {
    heard.push(Object.assign(new Error(message), options))
  }) as typeof process.emitWarning
  onTestFinished(() => {
    process.emitWarning = emit
  })
  return heard
}

/** Embeds nothing and remembers what it was given. */
function deafEncoder(own: Tokenizer): PromptEncoder & { readonly ids: number[][] } {
  const ids: number[][] = []
  return {
    tokenizer: own,
    ids,
    textEncoder: {
      encode: async ({ inputIds }) => {
        const [batch, tokens] = inputIds.shape as readonly [number, number]
        for (let i = 0; i < batch; i++) ids.push([...inputIds.data.slice(i * tokens, (i + 1) * tokens)])
        return inputIds.cast('float32').reshape([batch, tokens, 1])
      },
    },
  }
}

describe('prompts of FLUX.2-dev', () => {
  it('render as in transformers', () => {
    expect(SYSTEM_MESSAGE).toBe(dev.system_message)
    expect(dev.prompts.map((prompt) => tokenizer.applyChatTemplate(devMessages(prompt)))).toEqual(dev.rendered)
  })

  it.each(['512', '128'])('become the ids of transformers at %s tokens, padded on the left', (length) => {
    const { token_ids_unpadded: expected, pad_left: padding } = dev.cases[length] as TextGolden['cases'][string]
    for (const [i, prompt] of dev.prompts.entries()) {
      const { inputIds, attentionMask } = tokenizeDevPrompt(tokenizer, prompt, Number(length))
      const pads = new Array(padding[i]).fill(dev.pad_token_id)
      expect([...inputIds], prompt).toEqual([...pads, ...(expected[i] as number[])])
      expect([...attentionMask]).toEqual([...pads.fill(0), ...(expected[i] as number[]).map(() => 1)])
    }
  })

  it('can fail: with [IMG] or a second <s> the ids differ', () => {
    const [, , , withImage] = dev.prompts as [string, string, string, string]
    expect(withImage).toContain('[IMG]')
    const expected = dev.cases['512']?.token_ids_unpadded[3]
    const kept = devMessages('').map((message, i) =>
      i === 0 ? message : { ...message, content: [{ type: 'text', text: withImage }] },
    )
    const encode = (text: string, addSpecialTokens: boolean) => [
      ...tokenizer.encode(text, { addSpecialTokens }).inputIds,
    ]
    expect(encode(tokenizer.applyChatTemplate(kept), false)).not.toEqual(expected)
    expect(encode(dev.rendered[3] as string, true)).not.toEqual(expected)
    expect(encode(dev.rendered[3] as string, false)).toEqual(expected)
  })

  it.each([512, 128])('become the embeddings of diffusers at %i tokens', async (maxSequenceLength) => {
    heardWarnings()
    const golden = await loadGolden('text/flux2-tiny.safetensors')
    await using backend = await ort({ device: 'cpu' })
    await using textEncoder = await Mistral3ForConditionalGeneration.fromPretrained(referencePath('flux2-tiny'), {
      subfolder: 'text_encoder',
      backend,
    })
    const prompts = (dev.prompt_embeds_rows[maxSequenceLength] ?? []).map((row) => dev.prompts[row] as string)
    const { embeds, ids } = await encodeDevPrompt(
      prompts,
      { tokenizer, textEncoder },
      { ...devOptions, maxSequenceLength },
    )
    expectClose(embeds, golden.get(`len${maxSequenceLength}.prompt_embeds`), TOLERANCE)
    expectSameIds(ids, golden.get(`len${maxSequenceLength}.text_ids`))
  })

  it('are each repeated in a row', async () => {
    const encoder = deafEncoder(tokenizer)
    const options = { ...devOptions, numImagesPerPrompt: 2 }
    const { embeds } = await encodeDevPrompt(['a cat', 'a dog'], encoder, options)
    expect(embeds.shape).toEqual([4, 128, 1])
    expect(encoder.ids).toHaveLength(2)
    const [cat, dog] = encoder.ids as [number[], number[]]
    expect([...embeds.data]).toEqual([...cat, ...cat, ...dog, ...dog])
  })
})

describe('prompts of FLUX.2-klein', () => {
  it.each([512, 128])('become the embeddings of diffusers at %i tokens', async (maxSequenceLength) => {
    heardWarnings()
    const directory = referencePath('flux2-klein-tiny')
    const { prompts: all, prompt_embeds_rows: rows } = await goldenOf('flux2-klein-tiny')
    const golden = await loadGolden('text/flux2-klein-tiny.safetensors')
    await using backend = await ort({ device: 'cpu' })
    await using textEncoder = await Qwen3ForCausalLM.fromPretrained(directory, { subfolder: 'text_encoder', backend })
    const encoder = { tokenizer: await Tokenizer.fromPretrained(directory, { subfolder: 'tokenizer' }), textEncoder }
    const prompts = (rows[maxSequenceLength] ?? []).map((row) => all[row] as string)
    const options = { ...common, maxSequenceLength, textEncoderOutLayers: [9, 18, 27] }
    const { embeds, ids } = await encodeKleinPrompt(prompts, encoder, options)
    expectClose(embeds, golden.get(`len${maxSequenceLength}.prompt_embeds`), TOLERANCE)
    expectSameIds(ids, golden.get(`len${maxSequenceLength}.text_ids`))
  })
})

function expectSameIds(ids: Tensor, golden: Tensor): void {
  expect([...ids.data].map(Number)).toEqual([...golden.data].map(Number))
}

describe('truncation', () => {
  it('is warned of once, with what is cut off', async () => {
    const warnings = heardWarnings()
    const long = dev.prompts[LONG_PROMPT] as string
    await encodeDevPrompt([long, 'a cat', long], deafEncoder(tokenizer), { ...devOptions, numImagesPerPrompt: 3 })
    expect(warnings).toMatchObject([{ code: 'PROMPT_TRUNCATED', message: expect.stringContaining('128') }])
    const message = warnings[0]?.message as string
    expect(message.split('cut off').length).toBe(2)
    expect(message).toContain('a photo of dog number 59 running on the beach at sunset, golden hour,')
    expect(message).not.toContain('dog number 0 ')
    expect(message).not.toContain('[/INST]')
  })

  it('is not warned of where nothing is cut off, or on other ranks', async () => {
    const warnings = heardWarnings()
    await encodeDevPrompt(['a cat'], deafEncoder(tokenizer), devOptions)
    await encodeDevPrompt([dev.prompts[LONG_PROMPT] as string], deafEncoder(tokenizer), { ...devOptions, warns: false })
    expect(warnings).toEqual([])
  })

  it('of one token is noticed, at exactly the length it is not', async () => {
    const warnings = heardWarnings()
    const length = tokenizer.encode(tokenizer.applyChatTemplate(devMessages('a cat')), { addSpecialTokens: false })
      .inputIds.length
    await encodeDevPrompt(['a cat'], deafEncoder(tokenizer), { ...devOptions, maxSequenceLength: length })
    expect(warnings).toEqual([])
    await encodeDevPrompt(['a cat'], deafEncoder(tokenizer), { ...devOptions, maxSequenceLength: length - 1 })
    expect(warnings).toHaveLength(1)
  })
})
