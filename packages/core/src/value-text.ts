/**
 * Any value as text for an error, which must not fail over the value that it is about: not every value can become a string,
 * as an object without prototype or a `Proxy` cannot.
 */
export function textOf(value: unknown): string {
  return textWithin(value, [])
}

/** Any value as JSON for an error, or as text where JSON does not have it. */
export function jsonOf(value: unknown): string {
  try {
    return JSON.stringify(value) ?? textOf(value)
  } catch {
    return textOf(value)
  }
}

/** @param around - the lists that the value is in, of which it may be one */
function textWithin(value: unknown, around: readonly unknown[]): string {
  if (around.includes(value)) return '[…]'
  try {
    if (!Array.isArray(value)) return String(value)
    // Without `map`, which a list may have of its own.
    return `[${Array.from(value, (each) => textWithin(each, [...around, value])).join(', ')}]`
  } catch {
    return `[${typeof value}]`
  }
}
