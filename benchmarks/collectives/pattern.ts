// What is reduced. gloo-rank.py and openmpi.c use the same numbers.

/** A prime: a block that lands in another place does not go unnoticed. */
const PERIOD = 251

/** Whole numbers, different on each rank and in each place. */
export function fill(data: Float32Array, rank: number): void {
  for (let i = 0; i < data.length; i++) data[i] = (i % PERIOD) * (rank + 1) + rank
}

/**
 * The sums after a number of all-reduces in place are exact: whole numbers below 2^24, times a power of two because
 * there are 2 or 4 ranks.
 *
 * @throws Error at the first element that is wrong
 */
export function requireSums(data: Float32Array, ranks: number, operations: number): void {
  const factor = (ranks * (ranks + 1)) / 2
  const offset = (ranks * (ranks - 1)) / 2
  const scale = ranks ** (operations - 1)
  for (let i = 0; i < data.length; i++) {
    const sum = ((i % PERIOD) * factor + offset) * scale
    if (data[i] === sum) continue
    throw new Error(
      `wrong sum: element ${i} of ${data.length} is ${data[i]}, not ${sum}, after ${operations} operations`,
    )
  }
}
