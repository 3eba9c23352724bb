import { InvalidArgumentError } from 'commander'

export function positiveInteger(text: string): number {
  if (!/^[1-9]\d*$/.test(text)) throw new InvalidArgumentError('It is a whole number from 1.')
  return Number(text)
}

/** Several, with commas. */
export function positiveIntegers(text: string): readonly number[] {
  return text.split(',').map(positiveInteger)
}
