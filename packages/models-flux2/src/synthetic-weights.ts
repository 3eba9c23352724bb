import { type Shape, sizeOf, Tensor } from '@rankwise/core'

const BLOCK = 2 ** 23

/**
 * Random weights that keep activations finite through a deep network: those of norms and variances are 1, all others of
 * both signs, from 2^-7 to 2^-5. A matrix of 3072 columns then keeps the size of what goes through it.
 */
export class SyntheticWeights {
  readonly #block = randomBlock()
  #next = 0

  /** The next weight, bfloat16; no two of the same size have the same numbers in the same places. */
  weight(name: string, shape: Shape): Tensor<'bfloat16'> {
    const data = new Uint16Array(sizeOf(shape))
    if (isScale(name)) data.fill(ONE)
    else for (let done = 0; done < data.length; ) done += this.#fill(data, done)
    return new Tensor('bfloat16', shape, data)
  }

  #fill(data: Uint16Array, start: number): number {
    const count = Math.min(data.length - start, BLOCK - this.#next)
    data.set(this.#block.subarray(this.#next, this.#next + count), start)
    // An odd stride: whole blocks that follow each other would be alike.
    this.#next = (this.#next + count + 1) % BLOCK
    return count
  }
}

/** 1 in bfloat16. */
const ONE = 0x3f80

/** Whether what a weight multiplies keeps its size: scales of norms, and variances. */
function isScale(name: string): boolean {
  return /norm[^.]*\.weight$|running_var$/.test(name)
}

function randomBlock(): Uint16Array {
  const block = new Uint16Array(BLOCK)
  // The generator of Numerical Recipes; its high bits are random enough.
  let state = 1
  for (let i = 0; i < BLOCK; i++) {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0
    const sign = (state >>> 16) & 0x8000
    const exponent = 120 + ((state >>> 30) & 1)
    block[i] = sign | (exponent << 7) | ((state >>> 8) & 0x7f)
  }
  return block
}
