import { RankwiseError } from './errors.ts'

/** Environment variables, as in `process.env`. */
export type Environment = Readonly<Record<string, string | undefined>>

/** @throws RankwiseError `RENDEZVOUS_ENV` */
export function optionalInteger(env: Environment, name: string, min: number, max: number): number | undefined {
  return env[name] === undefined ? undefined : integer(env, name, min, max)
}

/**
 * @param maxName what the upper bound is, for the error
 * @throws RankwiseError `RENDEZVOUS_ENV` when the variable is not such an integer
 */
export function integer(env: Environment, name: string, min: number, max: number, maxName?: string): number {
  const text = env[name] ?? ''
  const value = /^\d+$/.test(text) ? Number(text) : Number.NaN
  if (value >= min && value <= max) return value
  const bound = maxName === undefined ? max : `${maxName} (${max})`
  throw invalid(name, text, `${name} is an integer from ${min} to ${bound}`)
}

/** @returns the error about one variable */
export function invalid(name: string, value: string | undefined, rule: string, remedy?: string): RankwiseError {
  return new RankwiseError('RENDEZVOUS_ENV', value === undefined ? 'is not set' : 'has no valid value', {
    where: `environment variable ${name}`,
    actual: { [name]: value === undefined ? 'unset' : JSON.stringify(value) },
    rule,
    remedy: remedy ?? 'start the ranks with `rankwise run --nproc-per-node N script`',
  })
}
