/** How long one product takes. */
export interface Times {
  /** An instruction set, `read` for reading the weights only, or a dtype of torch. */
  readonly kernel: string
  /** The median. */
  readonly milliseconds: number
  readonly minMilliseconds: number
  readonly maxMilliseconds: number
  /** Of all threads together, in the product that took the least. */
  readonly minCpuMilliseconds: number
}

export interface Row extends Times {
  readonly m: number
  readonly n: number
  readonly k: number
  readonly threads: number
}

/** GFLOP/s of the median and of the least CPU time of a core, and how fast weights in bfloat16 are read. */
export function formatRow(row: Row): string {
  const weights = 2 * row.n * row.k
  const flops = 2 * row.m * row.n * row.k
  const perCore = (flops / row.minCpuMilliseconds / 1e6).toFixed(1)
  const rates = `${(flops / row.milliseconds / 1e6).toFixed(1).padStart(6)} GFLOP/s (${perCore} per core)`
  const times = `${row.milliseconds.toFixed(2)} ms (${row.minMilliseconds.toFixed(2)}–${row.maxMilliseconds.toFixed(2)})`
  return [
    `${row.m} x ${row.n} x ${row.k}`.padEnd(20),
    `${row.threads} threads`,
    row.kernel.padEnd(14),
    (row.kernel === 'read' ? `${(weights / row.minCpuMilliseconds / 1e6).toFixed(1)} GB/s per core` : rates).padEnd(36),
    times.padEnd(32),
    `${(weights / row.milliseconds / 1e6).toFixed(1)} GB/s`,
  ].join('  ')
}
