import type { Readable, Writable } from 'node:stream'

const NEWLINE = 0x0a

/** Longer lines are broken, so that output without newlines is neither held back for ever nor kept in memory. */
const MAX_LINE_BYTES = 65_536

/**
 * Copies `from` to `to` line by line, each behind `prefix` (ASCII), and waits for `to` where it is slower. Only whole
 * lines are written, so that several streams can share `to`; the last line gets its newline if it has none.
 *
 * @throws what `to` fails with
 */
export async function prefixLines(from: Readable, to: Writable, prefix: string): Promise<void> {
  let rest: Buffer = Buffer.alloc(0)
  for await (const chunk of from as AsyncIterable<Buffer>) {
    rest = Buffer.concat([rest, chunk])
    const end = rest.lastIndexOf(NEWLINE) + 1
    if (end > 0) await write(to, prefixEach(rest.subarray(0, end - 1), prefix))
    rest = rest.subarray(end)
    while (rest.length > MAX_LINE_BYTES) {
      const cut = characterStart(rest, MAX_LINE_BYTES)
      await write(to, prefixEach(rest.subarray(0, cut), prefix))
      rest = rest.subarray(cut)
    }
  }
  if (rest.length > 0) await write(to, prefixEach(rest, prefix))
}

/** Works on bytes (latin1 maps them one to one), so that output in any encoding passes unchanged. */
function prefixEach(lines: Buffer, prefix: string): Buffer {
  const text = lines.toString('latin1').split('\n')
  return Buffer.from(text.map((line) => `${prefix}${line}\n`).join(''), 'latin1')
}

/** The last position up to `at` where no UTF-8 character is cut. */
function characterStart(bytes: Buffer, at: number): number {
  let start = at
  while (start > at - 4 && ((bytes[start] as number) & 0xc0) === 0x80) start--
  return start
}

function write(to: Writable, bytes: Buffer): Promise<void> {
  return new Promise((resolve, reject) => {
    to.write(bytes, (error) => (error ? reject(error) : resolve()))
  })
}
