import { RankwiseError } from '../errors.ts'

/**
 * Refuses options that a collectives package does not have: `initProcessGroup` passes on whatever it is given.
 *
 * @param backend name of the collectives
 * @throws RankwiseError `COLLECTIVES_OPTIONS`
 */
export function requireKnownOptions(backend: string, options: object, known: readonly string[]): void {
  const unknown = Object.keys(options).filter((name) => !known.includes(name))
  if (unknown.length === 0) return
  throw new RankwiseError('COLLECTIVES_OPTIONS', `collectives '${backend}' have no such options`, {
    where: `options of '${backend}'`,
    actual: { unknown },
    rule: `options are ${known.join(', ')}`,
  })
}
