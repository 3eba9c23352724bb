const STATE_SIZE = 624
const SHIFT_SIZE = 397

/**
 * The 32-bit Mersenne Twister MT19937 of Matsumoto and Nishimura (1998), seeded by their 2002 `init_genrand`. Constants
 * are the paper's.
 */
export class MersenneTwister {
  readonly #state = new Uint32Array(STATE_SIZE)
  #next = STATE_SIZE

  /** @param seed unsigned 32-bit integer */
  constructor(seed: number) {
    let previous = seed >>> 0
    this.#state[0] = previous
    for (let i = 1; i < STATE_SIZE; i++) {
      previous = (Math.imul(1812433253, previous ^ (previous >>> 30)) + i) >>> 0
      this.#state[i] = previous
    }
  }

  /** A generator that goes on as this one would, independently of it. */
  clone(): MersenneTwister {
    const clone = new MersenneTwister(0)
    clone.#state.set(this.#state)
    clone.#next = this.#next
    return clone
  }

  /** The next output, uniform over the unsigned 32-bit integers. */
  nextUint32(): number {
    if (this.#next === STATE_SIZE) this.#twist()
    let word = this.#state[this.#next++] as number
    word ^= word >>> 11
    word ^= (word << 7) & 0x9d2c5680
    word ^= (word << 15) & 0xefc60000
    word ^= word >>> 18
    return word >>> 0
  }

  #twist(): void {
    const state = this.#state
    for (let i = 0; i < STATE_SIZE; i++) {
      const upper = (state[i] as number) & 0x80000000
      const lower = (state[(i + 1) % STATE_SIZE] as number) & 0x7fffffff
      const word = upper | lower
      const shifted = (state[(i + SHIFT_SIZE) % STATE_SIZE] as number) ^ (word >>> 1)
      state[i] = word & 1 ? shifted ^ 0x9908b0df : shifted
    }
    this.#next = 0
  }
}
