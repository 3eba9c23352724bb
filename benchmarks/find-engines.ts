import type { Command } from 'commander'

/** An engine and what there is to say about it, or why there is none. */
export type Found<E> = { readonly engine: E; readonly about: string } | { readonly missing: string }

/** What looks for the engines of a benchmark. */
export interface EngineSearch<N extends string, E> {
  /** Has options for the names of engines and for `python`. */
  readonly program: Command
  /** Name of the first of these options. */
  readonly option: string
  readonly names: readonly N[]
  /** One of them, as it is on this machine; torch in `python`. */
  readonly find: (name: N, python: string) => Promise<Found<E>>
}

/** What was named has to be there; of the rest, what is missing is skipped. Says of each what it is, or why not. */
export async function findEngines<N extends string, E>({
  program,
  option,
  names,
  find,
}: EngineSearch<N, E>): Promise<readonly E[]> {
  const isNamed = (name: string) => program.getOptionValueSource(name) === 'cli'
  const { python } = program.opts<{ readonly python: string }>()
  const engines: E[] = []
  for (const name of names) {
    const found = await find(name, python)
    if ('engine' in found) engines.push(found.engine)
    else if (name === 'torch' && isNamed('python')) program.error(`--python: ${found.missing}`, { exitCode: 2 })
    else if (isNamed(option)) program.error(`--${option}: ${name}: ${found.missing}`, { exitCode: 2 })
    console.log(`${name}: ${'missing' in found ? `skipped, ${found.missing}` : found.about}`)
  }
  return engines
}
