import { RankwiseError, type Tensor, throwIfAborted } from '@rankwise/core'
import type { HiddenStateEncoder, TextEncodeOptions, TextEncoderInputs } from '@rankwise/diffusion'

type Load = (signal: AbortSignal | undefined) => Promise<HiddenStateEncoder>

/**
 * A text encoder that has its weights only while it is needed: it loads them when it encodes, and frees them when the
 * last work that uses it has ended. Work on several ranks loads and encodes on all of them.
 */
export class OnDemandTextEncoder implements HiddenStateEncoder {
  readonly #load: Load
  #loading: Promise<HiddenStateEncoder> | undefined
  #users = 0
  #isDisposed = false

  /** @param load - loads the weights, on all ranks that share them */
  constructor(load: Load) {
    this.#load = load
  }

  /** Does work that may encode several times, and keeps the weights until it has ended. */
  async during<T>(work: () => Promise<T>): Promise<T> {
    this.#users++
    try {
      return await work()
    } finally {
      this.#users--
      if (this.#users === 0) await this.#free()
    }
  }

  /**
   * The hidden states of the encoder that it loads.
   *
   * @throws RankwiseError `MODEL_NOT_LOADED` after it was disposed of, `ABORTED`, and those of the load and the encoder
   */
  async encode(inputs: TextEncoderInputs, options: TextEncodeOptions = {}): Promise<Tensor> {
    return this.during(async () => (await this.#loaded(options.signal)).encode(inputs, options))
  }

  /** Frees the weights, if they are loaded, and loads them no more; idempotent. */
  async dispose(): Promise<void> {
    this.#isDisposed = true
    await this.#free()
  }

  /** `dispose`, for `await using`. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.dispose()
  }

  /** Loads it, or waits for a load that has begun; where that fails or is aborted, whoever waits tries it again. */
  async #loaded(signal: AbortSignal | undefined): Promise<HiddenStateEncoder> {
    for (;;) {
      throwIfAborted(signal)
      if (this.#isDisposed) throw disposed()
      const begun = this.#loading
      const loading = begun ?? this.#load(signal)
      this.#loading = loading
      try {
        return await loading
      } catch (error) {
        if (this.#loading === loading) this.#loading = undefined
        if (begun === undefined) throw error
      }
    }
  }

  async #free(): Promise<void> {
    const loading = this.#loading
    this.#loading = undefined
    const encoder = await loading?.catch(() => undefined)
    await encoder?.dispose()
  }
}

/** Does work that encodes with a text encoder; one that is loaded on demand is loaded at most once, and freed after it. */
export function whileLoaded<T>(encoder: HiddenStateEncoder, work: () => Promise<T>): Promise<T> {
  return encoder instanceof OnDemandTextEncoder ? encoder.during(work) : work()
}

function disposed(): RankwiseError {
  return new RankwiseError('MODEL_NOT_LOADED', 'the text encoder was disposed of', {
    where: 'textEncoder',
    remedy: 'load the pipeline with fromPretrained',
  })
}
