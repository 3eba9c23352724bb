/** What the ranks do together, in processes of their own. */
export interface Scenario {
  readonly name: 'results' | 'mismatch' | 'abort' | 'kill' | 'time'
  /** Ranks that it takes. */
  readonly atLeast: number
  /** The rank that ends by SIGKILL. */
  readonly dies?: number
}

export const SCENARIOS: readonly Scenario[] = [
  { name: 'results', atLeast: 1 },
  { name: 'mismatch', atLeast: 2 },
  { name: 'abort', atLeast: 2 },
  { name: 'kill', atLeast: 2, dies: 1 },
  { name: 'time', atLeast: 1 },
]
