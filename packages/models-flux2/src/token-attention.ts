import { attention, concat, type TracedTensor } from '@rankwise/core'

/** Keys and values of tokens, both `[batch, tokens, heads, headDim]`; keys are rotated. */
export interface KeyValues {
  readonly keys: TracedTensor
  readonly values: TracedTensor
}

/** Which tokens attend to which. One of them goes through all blocks of a forward, in their order. */
export interface TokenAttention {
  /** Over text, then image tokens `[batch, tokens, heads, headDim]`, queries and keys rotated; to the same. */
  attend(queries: TracedTensor, keys: TracedTensor, values: TracedTensor): TracedTensor
}

/** All tokens attend to all. */
export class FullAttention implements TokenAttention {
  attend(queries: TracedTensor, keys: TracedTensor, values: TracedTensor): TracedTensor {
    return attention(queries, keys, values)
  }
}

/** How many tokens of each kind there are, in this order. */
export interface TokenCounts {
  readonly text: number
  readonly references: number
  readonly image: number
}

/**
 * Reference tokens attend to themselves only, all others to all: so the keys and values of references do not depend on
 * the noise, and serve every step.
 */
export class ReferenceExtraction implements TokenAttention {
  /** Those of the references, in the order of the blocks. */
  readonly extracted: KeyValues[] = []
  readonly #sizes: readonly number[]

  constructor({ text, references, image }: TokenCounts) {
    this.#sizes = [text, references, image]
  }

  attend(queries: TracedTensor, keys: TracedTensor, values: TracedTensor): TracedTensor {
    const [text, references, image] = this.#split(queries)
    const [, referenceKeys] = this.#split(keys)
    const [, referenceValues] = this.#split(values)
    this.extracted.push({ keys: referenceKeys, values: referenceValues })
    const others = attention(concat([text, image], 1), keys, values)
    const [textOut, imageOut] = others.split([text.size(1), image.size(1)], 1) as [TracedTensor, TracedTensor]
    return concat([textOut, attention(references, referenceKeys, referenceValues), imageOut], 1)
  }

  #split(x: TracedTensor): readonly [text: TracedTensor, references: TracedTensor, image: TracedTensor] {
    return x.split(this.#sizes, 1) as [TracedTensor, TracedTensor, TracedTensor]
  }
}

/** Text and image tokens attend to themselves and to references of which only keys and values are there. */
export class ReferenceReuse implements TokenAttention {
  readonly #textTokens: number
  readonly #extracted: Iterator<KeyValues>

  /** @param extracted - those of a `ReferenceExtraction` */
  constructor(textTokens: number, extracted: readonly KeyValues[]) {
    this.#textTokens = textTokens
    this.#extracted = extracted[Symbol.iterator]()
  }

  attend(queries: TracedTensor, keys: TracedTensor, values: TracedTensor): TracedTensor {
    const references = this.#extracted.next().value as KeyValues
    return attention(queries, this.#insert(keys, references.keys), this.#insert(values, references.values))
  }

  #insert(x: TracedTensor, references: TracedTensor): TracedTensor {
    const [text, image] = x.split([this.#textTokens, x.size(1) - this.#textTokens], 1) as [TracedTensor, TracedTensor]
    return concat([text, references, image], 1)
  }
}
