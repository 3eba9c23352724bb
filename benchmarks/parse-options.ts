import { InvalidArgumentError } from 'commander'
import { kleinConfig } from './klein-config.ts'

export function positiveInteger(text: string): number {
  if (!/^[1-9]\d*$/.test(text)) throw new InvalidArgumentError('It is a whole number from 1.')
  return Number(text)
}

/** Several, with commas. */
export function positiveIntegers(text: string): readonly number[] {
  return text.split(',').map(positiveInteger)
}

/** Names that are known, with commas, each once. */
export function namesOf<T extends string>(known: readonly T[]): (text: string) => readonly T[] {
  return (text) => {
    const names = text.split(',')
    if (names.every((name) => (known as readonly string[]).includes(name))) return [...new Set(names)] as T[]
    throw new InvalidArgumentError(`It is of ${known.join(', ')}.`)
  }
}

/** Degrees that split the heads of klein-4B, with commas. */
export function degrees(text: string): readonly number[] {
  const numbers = positiveIntegers(text)
  const { num_attention_heads: heads } = kleinConfig({ double: 1, single: 1 })
  if (numbers.every((degree) => heads % degree === 0)) return numbers
  throw new InvalidArgumentError(`It divides ${heads} heads.`)
}
