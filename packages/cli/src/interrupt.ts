import { constants } from 'node:os'

const SIGNALS = ['SIGINT', 'SIGTERM'] as const

/** A command that ended because it was told to. */
export class Interrupted extends Error {
  /** 128 + n for signal n, as in a shell. */
  readonly exitCode: number

  constructor(signal: NodeJS.Signals) {
    super(`interrupted by ${signal}`)
    this.name = 'Interrupted'
    this.exitCode = 128 + constants.signals[signal]
  }
}

/**
 * Runs `body` with a signal that Ctrl-C aborts, so that it can give back what it took.
 *
 * @throws Interrupted when it failed after it was told to end
 */
export async function untilInterrupted<T>(body: (signal: AbortSignal) => Promise<T>): Promise<T> {
  const controller = new AbortController()
  const interrupt = (signal: NodeJS.Signals) => controller.abort(new Interrupted(signal))
  for (const signal of SIGNALS) process.on(signal, interrupt)
  try {
    return await body(controller.signal)
  } catch (error) {
    throw controller.signal.aborted ? controller.signal.reason : error
  } finally {
    for (const signal of SIGNALS) process.off(signal, interrupt)
  }
}
