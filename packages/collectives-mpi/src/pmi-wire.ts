/** One line of the PMI-1 protocol: a command and its arguments. */
export interface PmiMessage {
  readonly command: string
  readonly fields: Readonly<Record<string, string>>
}

/** Sizes that the server announces, and keeps to. MPICH splits longer values. */
export const PMI_LIMITS = { kvsname: 256, key: 64, value: 1024 } as const

/** A line holds a key, a value, the name of the key-value space and what names them. */
export const PMI_LINE_LIMIT = PMI_LIMITS.kvsname + PMI_LIMITS.key + PMI_LIMITS.value + 256

/**
 * Reads one line, without its newline: `cmd=put kvsname=kvs key=k value=v`. A value ends at the next blank, and may
 * contain `=`.
 *
 * @returns undefined when the line is none of the protocol
 */
export function parsePmiLine(line: string): PmiMessage | undefined {
  const fields: Record<string, string> = Object.create(null)
  for (const word of line.split(' ')) {
    if (word === '') continue
    const equals = word.indexOf('=')
    if (equals < 1) return undefined
    fields[word.slice(0, equals)] = word.slice(equals + 1)
  }
  const { cmd, ...rest } = fields
  return cmd === undefined ? undefined : { command: cmd, fields: rest }
}

/** The line that {@link parsePmiLine} reads, with its newline. */
export function formatPmiLine({ command, fields }: PmiMessage): string {
  const words = Object.entries(fields).map(([name, value]) => ` ${name}=${value}`)
  return `cmd=${command}${words.join('')}\n`
}
