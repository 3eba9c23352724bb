/** Cuts a stream of bytes into lines of limited length, so that no peer can make this process buffer more. */
export class LineReader {
  /** Longest accepted line, in bytes. */
  limit: number
  #rest: Buffer = Buffer.alloc(0)

  constructor(limit: number) {
    this.limit = limit
  }

  /** The lines that `chunk` completes, without their newlines; undefined when one is too long. */
  push(chunk: Buffer): string[] | undefined {
    const lines: string[] = []
    let rest = this.#rest.length === 0 ? chunk : Buffer.concat([this.#rest, chunk])
    for (let end = rest.indexOf('\n'); end >= 0; end = rest.indexOf('\n')) {
      if (end > this.limit) return undefined
      lines.push(rest.toString('utf8', 0, end))
      rest = rest.subarray(end + 1)
    }
    if (rest.length > this.limit) return undefined
    this.#rest = rest
    return lines
  }
}
