/** What a step is computed in. The checkpoint is bfloat16 for both. */
export type StepDType = 'float32' | 'bfloat16'

export const STEP_DTYPES: readonly StepDType[] = ['float32', 'bfloat16']

/** What computes a step. */
export type BackendName = 'ort' | 'tfjs' | 'diffusers'

/** Tokens of the picture and of the text. */
export interface Tokens {
  readonly image: number
  readonly text: number
}

/** A step and on how many ranks it runs, of how many threads each. */
export interface StepCase {
  readonly dtype: StepDType
  readonly tokens: Tokens
  readonly tp: number
  readonly threads: number
}

/** Runs until `seconds` have passed or `most` are done, and at least one. */
export interface Limit {
  readonly seconds: number
  readonly most: number
}

/** What every rank is told to run, as JSON: the same in Node and in Python. */
export interface Job extends StepCase {
  readonly backend: BackendName
  /** Of the backend: how it computes. */
  readonly engine: string
  /** The checkpoint. */
  readonly folder: string
  /** Whether every thread has a processor of its own; on the engine capi only. */
  readonly pinThreads: boolean
  readonly warmUp: Limit
  readonly timed: Limit
  /** Steps after those that count, in which the event loop is looked at; of Rankwise only. */
  readonly watched: Limit
  /** File that gets a trace of the steps that count; of Rankwise only. */
  readonly trace?: string | undefined
}

/** What a rank says of its steps. */
export interface StepReport {
  /** Seconds of every step that counts. */
  readonly seconds: readonly number[]
  /** Seconds in all-reduces, of all these steps together; null where the engine does not tell. */
  readonly allReduceSeconds: number | null
  /** Bytes of the weights that the rank read into memory of its own; null where the engine does not tell. */
  readonly readBytes: number | null
  /** Longest time for which the event loop was held in the steps after them, in milliseconds; null where there is none. */
  readonly eventLoopMilliseconds: number | null
}
