import type { ComponentName, PipelineDType } from '@rankwise/models-flux2'
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

/** Dtypes of models, by their names; `default` is for those that are not named. */
export type NamedDTypes = { readonly [K in ComponentName | 'default']?: PipelineDType }

const DTYPES: readonly string[] = ['float32', 'bfloat16'] satisfies readonly PipelineDType[]

const COMPONENTS: ReadonlyMap<string, ComponentName> = new Map([
  ['transformer', 'transformer'],
  ['text-encoder', 'textEncoder'],
  ['vae', 'vae'],
])

/** `bfloat16` for all models, or `vae=float32` for one; may be given several times. */
export function dtypes(text: string, before: NamedDTypes = {}): NamedDTypes {
  const at = text.indexOf('=')
  const [component, value] = at < 0 ? [undefined, text] : [text.slice(0, at), text.slice(at + 1)]
  const name = component === undefined ? 'default' : COMPONENTS.get(component)
  if (name === undefined) {
    throw new InvalidArgumentError(`There is no model '${component}', only ${[...COMPONENTS.keys()].join(', ')}.`)
  }
  if (!DTYPES.includes(value)) throw new InvalidArgumentError(`It is ${DTYPES.join(' or ')}, or that of a model.`)
  if (before[name] !== undefined)
    throw new InvalidArgumentError(`It is given twice${component === undefined ? '' : ` for ${component}`}.`)
  return { ...before, [name]: value }
}
