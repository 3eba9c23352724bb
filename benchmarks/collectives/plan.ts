/** How one size is measured, in the same way by every engine. */
export interface Plan {
  readonly bytes: number
  /** All-reduces between two looks at the clock. */
  readonly operations: number
  /** How often that is repeated. */
  readonly batches: number
  /** The first ones do not count: code is compiled and connections open. */
  readonly warmUps: number
}

/** 4608 tokens of 6144 float32: what FLUX.2-dev reduces for a picture of 1024 x 1024. */
const ACTIVATION_BYTES = 4608 * 6144 * 4

export const SIZES: readonly number[] = [4, 2 ** 10, 2 ** 16, 2 ** 20, 2 ** 24, ACTIVATION_BYTES]

/** Every operation multiplies the sums by the number of ranks: with 4 of them, 50 operations stay below 2^110. */
const MOST_OPERATIONS = 50
const BATCH_BYTES = 2 ** 22
const TOTAL_BYTES = 2 ** 28
const LEAST_BATCHES = 5
/** With a fifth as many warm-ups: V8 compiles what is called 2000 times; after 400, 4 bytes still took three times as long. */
const MOST_BATCHES = 200

export function planOf(bytes: number): Plan {
  const operations = clamp(Math.floor(BATCH_BYTES / bytes), 1, MOST_OPERATIONS)
  const counted = clamp(Math.floor(TOTAL_BYTES / bytes), LEAST_BATCHES, MOST_BATCHES)
  const warmUps = Math.ceil(counted / 5)
  return { bytes, operations, batches: warmUps + counted, warmUps }
}

function clamp(value: number, least: number, most: number): number {
  return Math.min(Math.max(value, least), most)
}

/** How a plan is told to a rank: `bytes:operations:batches`. */
export function planArgument({ bytes, operations, batches }: Plan): string {
  return `${bytes}:${operations}:${batches}`
}
