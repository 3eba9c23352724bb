import type { RankCommand } from '../rank-command.ts'

export type EngineName =
  | 'rankwise local'
  | 'rankwise in-arena'
  | 'rankwise tcp'
  | 'rankwise mpi'
  | 'gloo'
  | 'openmpi'
  | 'openmpi chunked'
  | 'openmpi tcp'

/** Something that reduces tensors over processes. */
export interface Engine {
  readonly name: EngineName
  /** Smaller tensors are not measured: another engine does the same with them. */
  readonly leastBytes?: number
  /** What to start, to reduce by every plan (see `planArgument`) on so many ranks. The first one prints the times. */
  commands(ranks: number, plans: readonly string[]): Promise<readonly RankCommand[]>
}

/** Engines and what there is to say about them, or why there are none. */
export type Found = { readonly engines: readonly Engine[]; readonly about: string } | { readonly missing: string }
