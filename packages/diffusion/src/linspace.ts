/**
 * `count` evenly spaced float64 values from `start` to `stop`, both included, with numpy's roundings: each value is
 * `i * step + start` and the last is `stop` itself.
 */
export function linspace(start: number, stop: number, count: number): number[] {
  const step = (stop - start) / (count - 1)
  return Array.from({ length: count }, (_, i) => {
    if (i === 0) return start
    return i === count - 1 ? stop : i * step + start
  })
}
