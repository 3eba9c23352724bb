import type { Collectives } from './collectives.ts'

/**
 * Lets work on a group of ranks begin only when the work before it has ended, in the order in which it asked. Exchanges
 * of two works at once could be taken for each other's: ranks would add parts of different results, and nobody would
 * notice. Every rank begins its works in the same order.
 */
export class Turns {
  readonly #last = new WeakMap<Collectives, Promise<void>>()

  /** Resolves when it is this work's turn; disposing the result ends it. A rank that is alone waits for nothing. */
  async take(collectives: Collectives | undefined): Promise<Disposable> {
    let end = () => {}
    if (collectives === undefined || collectives.worldSize === 1) return { [Symbol.dispose]: end }
    const before = this.#last.get(collectives)
    const ended = new Promise<void>((resolve) => {
      end = resolve
    })
    this.#last.set(collectives, ended)
    await before
    return { [Symbol.dispose]: end }
  }
}

/** Those of models: loads, runs and saves take turns with each other. */
export const turns: Turns = new Turns()
