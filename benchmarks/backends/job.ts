/** One kind of FLUX.2 block. */
export type BlockKind = 'single' | 'double'

export const BLOCK_KINDS: readonly BlockKind[] = ['single', 'double']

/** What weights are kept in, and may be multiplied in. */
export type BlockDType = 'float32' | 'bfloat16'

export const BLOCK_DTYPES: readonly BlockDType[] = ['float32', 'bfloat16']

/** What computes a block. `reference`: the float64 operations of core. */
export type BackendName = 'ort' | 'tfjs-native' | 'tfjs-wasm' | 'torch' | 'reference'

/** A block, and which share of it: that of rank 0 of `tp`. */
export interface BlockCase {
  readonly block: BlockKind
  /** Of text and image together. */
  readonly tokens: number
  readonly tp: number
}

/** Runs until `seconds` have passed or `most` are done, and at least one. */
export interface Limit {
  readonly seconds: number
  readonly most: number
}

/** Runs that do not count, then those that do. */
export interface Timing {
  readonly warmUp: Limit
  readonly timed: Limit
}

/** What a process is told to run, as JSON: the same in Node and in Python. */
export interface Job extends BlockCase {
  readonly backend: BackendName
  /** float64 is what the others are compared with. */
  readonly dtype: BlockDType | 'float64'
  readonly threads: number
  /** Where the config, the weights and the inputs are; see block-files.ts. */
  readonly folder: string
  /** The file that gets the results. */
  readonly output: string
  /** How it is timed. Without it, it runs once. */
  readonly timing?: Timing
}

/** A warm-up lets V8 compile and allocators grow; slow blocks have done both after one run. */
export const TIMING: Timing = { warmUp: { seconds: 1, most: 3 }, timed: { seconds: 3, most: 5 } }
