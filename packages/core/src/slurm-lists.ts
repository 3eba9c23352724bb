/** More hosts than any cluster has; a list that means more is not expanded. */
const MAX_ENTRIES = 100_000

/**
 * The hosts of a SLURM list: `node[01-03,7],gpu-a` is node01, node02, node03, node7 and gpu-a.
 *
 * @returns undefined when the text is no such list
 */
export function expandHostList(text: string): string[] | undefined {
  const hosts: string[] = []
  for (const item of splitOutsideBrackets(text)) {
    const expanded = expandHosts(item)
    if (expanded === undefined || hosts.length + expanded.length > MAX_ENTRIES) return undefined
    hosts.push(...expanded)
  }
  return hosts
}

/**
 * The tasks of each node: `2(x3),1` is 2, 2, 2 and 1.
 *
 * @returns undefined when the text is no such list
 */
export function expandTaskCounts(text: string): number[] | undefined {
  const counts: number[] = []
  for (const item of text.split(',')) {
    const match = /^(\d{1,7})(?:\(x(\d{1,6})\))?$/.exec(item)
    if (match === null) return undefined
    const nodes = Number(match[2] ?? 1)
    if (counts.length + nodes > MAX_ENTRIES) return undefined
    counts.push(...Array<number>(nodes).fill(Number(match[1])))
  }
  return counts
}

function splitOutsideBrackets(text: string): string[] {
  return text.split(/,(?![^[\]]*\])/)
}

/** Expands the first brackets of a name, and then those behind it. */
function expandHosts(item: string): string[] | undefined {
  const match = /^([^[\],\s]*)\[([^[\]]*)\](.*)$/.exec(item)
  if (match === null) return /^[^[\],\s]+$/.test(item) ? [item] : undefined
  const [, before = '', ranges = '', after = ''] = match
  const numbers = expandRanges(ranges)
  const rest = after === '' ? [''] : expandHosts(after)
  if (numbers === undefined || rest === undefined || numbers.length * rest.length > MAX_ENTRIES) return undefined
  return numbers.flatMap((number) => rest.map((end) => before + number + end))
}

function expandRanges(text: string): string[] | undefined {
  const numbers: string[] = []
  for (const range of text.split(',')) {
    const match = /^(\d{1,9})(?:-(\d{1,9}))?$/.exec(range)
    if (match === null) return undefined
    const [, first = '', last = first] = match
    const count = Number(last) - Number(first) + 1
    if (count < 1 || numbers.length + count > MAX_ENTRIES) return undefined
    // Leading zeros are part of the name.
    for (let i = 0; i < count; i++) numbers.push(String(Number(first) + i).padStart(first.length, '0'))
  }
  return numbers
}
