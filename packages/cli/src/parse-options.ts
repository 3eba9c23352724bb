import { InvalidArgumentError } from 'commander'

/** A whole number within bounds, both included. */
export function integer(least: number, most = Number.MAX_SAFE_INTEGER): (text: string) => number {
  return (text) => {
    const value = Number(text)
    if (!/^\d+$/.test(text) || value < least || value > most) {
      const upper = most === Number.MAX_SAFE_INTEGER ? '' : ` and at most ${most}`
      throw new InvalidArgumentError(`It is a whole number of at least ${least}${upper}.`)
    }
    return value
  }
}

export function finiteNumber(text: string): number {
  const value = Number(text)
  if (text.trim() === '' || !Number.isFinite(value)) throw new InvalidArgumentError('It is a number.')
  return value
}

/** A seed as torch takes it: an integer of -2^63 to 2^64 - 1. */
export function seed(text: string): bigint {
  const value = /^-?\d+$/.test(text) ? BigInt(text) : undefined
  if (value === undefined || value < -(2n ** 63n) || value >= 2n ** 64n) {
    throw new InvalidArgumentError('It is an integer from -2^63 to 2^64 - 1.')
  }
  return value
}

/** The values of an option that may be given several times. */
export function collect(text: string, before: readonly string[] = []): readonly string[] {
  return [...before, text]
}
