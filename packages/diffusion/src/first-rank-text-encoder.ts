import { createHash } from 'node:crypto'
import {
  type Collectives,
  DTYPES,
  type FromFirst,
  type FromPretrainedOptions,
  getProcessGroup,
  loadTogether,
  RankwiseError,
  Tensor,
  turns,
} from '@rankwise/core'
import { z } from 'zod'
import { parseWith } from './config.ts'
import type { HiddenStateEncoder, TextEncodeOptions, TextEncoderInputs } from './decoder-text-encoder.ts'

/** What rank 0 says of its hidden states before it sends them. */
const announcement = z.object({ dtype: z.enum(DTYPES), shape: z.array(z.int().nonnegative()), request: z.string() })

/**
 * A text encoder of which rank 0 has all and the others nothing: it encodes and sends them the hidden states. All ranks
 * create it, encode the same texts, and dispose of it, which frees its weights before the denoising.
 *
 *     const load = (signal: AbortSignal) => Qwen3ForCausalLM.fromPretrained(directory, { backend, signal })
 *     await using encoder = await FirstRankTextEncoder.create(load)
 */
export class FirstRankTextEncoder implements HiddenStateEncoder {
  readonly #encoder: HiddenStateEncoder | undefined
  readonly #collectives: Collectives | undefined

  private constructor(encoder: HiddenStateEncoder | undefined, collectives: Collectives | undefined) {
    this.#encoder = encoder
    this.#collectives = collectives
  }

  /**
   * Loads the encoder on rank 0 of the process group, if there is one; the others wait, and where it fails, it fails on
   * all. As a part of another load (`within`), it fails on all with that.
   *
   * @param load - called on rank 0 alone, so without a `parallelConfig`
   * @throws what `load` throws; RankwiseError `LOAD_FAILED_ELSEWHERE`, `ABORTED`
   */
  static async create(
    load: (signal: AbortSignal) => Promise<HiddenStateEncoder>,
    { signal, within }: Pick<FromPretrainedOptions, 'signal' | 'within'> = {},
  ): Promise<FirstRankTextEncoder> {
    const collectives = getProcessGroup()?.collectives
    const isFirst = (collectives?.rank ?? 0) === 0
    const encoder = await loadTogether(async (stop) => (isFirst ? await load(stop) : undefined), {
      collectives,
      signal,
      within,
      release: (loaded) => loaded?.dispose(),
    })
    return new FirstRankTextEncoder(encoder, collectives)
  }

  /**
   * The hidden states of rank 0. Where it fails or one rank is aborted, it fails on all, and the group goes on.
   *
   * @throws RankwiseError `TEXTS_DIFFER` on a rank that was given other texts than rank 0, `ENCODE_FAILED_ELSEWHERE`,
   *   `ABORTED`, and on rank 0 what its encoder throws
   */
  async encode(inputs: TextEncoderInputs, options: TextEncodeOptions = {}): Promise<Tensor> {
    const encoding = loadTogether(
      (signal, fromFirst) => this.#encodeOnFirst(inputs, { ...options, signal }, fromFirst),
      { collectives: this.#collectives, signal: options.signal, release: () => {}, work: 'encode' },
    )
    // It is awaited below, and may fail before.
    encoding.catch(() => {})
    // Asked for at once: on every rank, no other work of the group comes between the encoding and the sending.
    using _turn = await turns.take(this.#collectives)
    const states = await encoding
    // No signal: it would end the group, and not only this.
    await this.#collectives?.broadcast(states, { source: 0 })
    return states
  }

  /** Frees the encoder on rank 0; idempotent. */
  async dispose(): Promise<void> {
    await this.#encoder?.dispose()
  }

  /** `dispose`, for `await using`. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.dispose()
  }

  /** The hidden states on rank 0, and zeros in their place on the others. */
  async #encodeOnFirst(inputs: TextEncoderInputs, options: TextEncodeOptions, fromFirst: FromFirst): Promise<Tensor> {
    const own = requestHash(inputs, options)
    let states: Tensor | undefined
    const text = await fromFirst(async () => {
      states = (await this.#encoder?.encode(inputs, options)) as Tensor
      return JSON.stringify({ dtype: states.dtype, shape: states.shape, request: own })
    })
    const { dtype, shape, request } = parseWith(announcement, JSON.parse(text), 'FirstRankTextEncoder')
    if (request === own) return states ?? Tensor.zeros(dtype, shape)
    throw new RankwiseError('TEXTS_DIFFER', 'the ranks were given different texts to encode', {
      where: 'FirstRankTextEncoder',
      actual: { rank: this.#collectives?.rank },
      rule: 'all ranks encode the same tokens for the same layers',
    })
  }
}

function requestHash({ inputIds, attentionMask }: TextEncoderInputs, { outLayers }: TextEncodeOptions): string {
  const hash = createHash('sha256').update(JSON.stringify(outLayers ?? 'default'))
  for (const { shape, data } of [inputIds, attentionMask]) {
    hash.update(`[${shape.join()}]`).update(new Uint8Array(data.buffer, data.byteOffset, data.byteLength))
  }
  return hash.digest('hex')
}
