import type { ByteRange } from '../checkpoint/shard-layout.ts'
import { etagOf, type HubAnswer } from './hub-answer.ts'
import { type HubPlace, hubError } from './hub-error.ts'
import type { HubTransport } from './hub-transport.ts'
import { retrying } from './retry.ts'
import { TransientError } from './transient-error.ts'

/** A file of a repository at a commit, as the hub lists it. */
export interface HubFile {
  /** Within the repository. */
  readonly path: string
  readonly size: number
  /** SHA-256 of a large file, git's SHA-1 of a small one: the name of its blob in the cache. */
  readonly oid: string
  /** Git's SHA-1 of what the repository itself stores: the content, or what points to a large one. */
  readonly blobId: string
  /** Hash of the storage that large files move to. */
  readonly xetHash?: string
}

/** Which file `RemoteFile` reads. */
export interface RemoteFileOptions {
  readonly repo: string
  readonly commit: string
  readonly file: HubFile
}

/** How `RangedFile.read` reads. */
export interface RangeReadOptions {
  /** Whether a server that always sends the whole file is refused; otherwise the bytes before the range are skipped. */
  readonly requireRanges: boolean
  readonly signal?: AbortSignal | undefined
  /** Called for every request that is sent. */
  readonly onRequest?: () => void
  /** Called with the number of bytes that arrive, skipped and repeated ones included. */
  readonly onReceived?: (bytes: number) => void
}

/** Takes bytes in the order of the file. */
export type ByteSink = (bytes: Uint8Array) => void | Promise<void>

/** A file of a hub that is read by ranges. */
export interface RangedFile {
  readonly file: HubFile
  /** On the hub. */
  readonly address: string
  /**
   * Reads a range into `sink`, going on where it stopped when the connection breaks.
   *
   * @throws RankwiseError `HUB_CHANGED` when the content is not that of the listing or of the answer before,
   *   `HUB_NO_RANGES`, `HUB_NETWORK`, `HUB_UNAUTHORIZED`, `HUB_NOT_FOUND`, `HUB_RESPONSE`, `ABORTED`, and what `sink`
   *   throws
   */
  read(range: ByteRange, sink: ByteSink, options: RangeReadOptions): Promise<void>
}

/** A file of a hub, read over HTTP. Every answer has to be about the same content. */
export class RemoteFile implements RangedFile {
  readonly file: HubFile
  readonly #place: HubPlace
  readonly #transport: HubTransport
  readonly #commit: string
  readonly address: string
  /** Where the hub redirected to: asked once, and again after a failure, because such addresses expire. */
  #storage: URL | undefined
  /** What the storage calls the content, as it stands in the header. */
  #validator: string | undefined

  constructor(transport: HubTransport, { repo, commit, file }: RemoteFileOptions) {
    this.file = file
    this.#place = { repo, file: file.path }
    this.#transport = transport
    this.#commit = commit
    const path = file.path.split('/').map(encodeURIComponent).join('/')
    this.address = `${transport.settings.endpoint}/${repo}/resolve/${commit}/${path}`
  }

  async read({ offset, length }: ByteRange, sink: ByteSink, options: RangeReadOptions): Promise<void> {
    const end = offset + length
    let position = offset
    const take: ByteSink = async (bytes) => {
      await sink(bytes)
      position += bytes.length
    }
    await retrying(
      async () => {
        try {
          if (position < end) await this.#attempt(position, end, take, options)
        } catch (error) {
          this.#storage = undefined
          // A server that does not end its answer has sent all the same.
          if (position < end || !(error instanceof TransientError)) throw error
        }
      },
      {
        policy: this.#transport.settings.retry,
        place: this.#place,
        signal: options.signal,
        progress: () => position,
      },
    )
  }

  async #attempt(start: number, end: number, sink: ByteSink, options: RangeReadOptions): Promise<void> {
    options.onRequest?.()
    const answer = await this.#request(start, end, options)
    try {
      this.#checkContent(answer)
      let skip = this.#checkRange(answer, start, end, options.requireRanges)
      let missing = end - start
      for await (const chunk of answer.chunks()) {
        options.onReceived?.(chunk.length)
        const bytes = chunk.subarray(Math.min(skip, chunk.length))
        skip -= chunk.length - bytes.length
        const isTooMuch = bytes.length > missing
        if (bytes.length > 0) await sink(isTooMuch ? bytes.subarray(0, missing) : bytes)
        if (isTooMuch) return
        // The answer is read to its end: only then the connection can be used again.
        missing -= bytes.length
      }
      if (missing > 0) throw new TransientError('the answer ends early')
    } finally {
      await answer.close()
    }
  }

  async #request(start: number, end: number, { requireRanges, signal }: RangeReadOptions): Promise<HubAnswer> {
    const isWhole = start === 0 && end === this.file.size && !requireRanges
    const range = { range: `bytes=${start}-${end - 1}` }
    // Only strong validators are compared (RFC 9110, 13.1.5).
    const condition = this.#validator?.startsWith('"') ? { 'if-range': this.#validator } : {}
    const answer = await this.#transport.get(this.#storage ?? this.address, {
      place: this.#place,
      headers: { 'accept-encoding': 'identity', ...(isWhole ? {} : { ...range, ...condition }) },
      signal,
    })
    this.#storage = answer.url
    return answer
  }

  /** Whether the answer is about the content that the listing names, and that answers before were about. */
  #checkContent({ headers, link, status }: HubAnswer): void {
    const { linkedEtag, commit } = link
    if (commit !== undefined && commit !== this.#commit) throw this.#changed({ commit, expected: this.#commit, status })
    if (linkedEtag !== undefined && linkedEtag !== this.file.oid) {
      throw this.#changed({ etag: linkedEtag, expected: this.file.oid, status })
    }
    const validator = headers.get('etag')?.trim()
    const known = this.#validator
    if (validator !== undefined && known !== undefined && etagOf(validator) !== etagOf(known)) {
      throw this.#changed({ etag: validator, expected: known, status })
    }
    this.#validator = validator ?? known
    const encoding = headers.get('content-encoding')
    if (encoding !== null && encoding !== 'identity') {
      throw this.#malformed('the file comes compressed', { contentEncoding: encoding })
    }
  }

  /** Returns how many bytes come before `start`. */
  #checkRange({ status, headers }: HubAnswer, start: number, end: number, requireRanges: boolean): number {
    const { size } = this.file
    if (status === 206) {
      const contentRange = headers.get('content-range') ?? 'none'
      const [, first, last, total] = /^bytes (\d+)-(\d+)\/(\d+|\*)$/.exec(contentRange) ?? []
      if (total !== undefined && total !== '*' && Number(total) !== size) throw this.#changed({ contentRange, size })
      if (Number(first) === start && Number(last) === end - 1) return 0
      throw this.#malformed('the hub sends another range than was asked for', { contentRange, start, end })
    }
    if (status === 200 && !requireRanges) {
      const length = headers.get('content-length')
      if (length !== null && Number(length) !== size) throw this.#changed({ bytes: length, size })
      return start
    }
    throw hubError('HUB_NO_RANGES', 'the server sends whole files only', this.#place, {
      actual: { status, start, end },
      rule: "download: 'shards' needs a server that answers range requests with status 206",
      remedy: "load with download: 'snapshot'",
    })
  }

  #changed(actual: Readonly<Record<string, unknown>>) {
    return hubError('HUB_CHANGED', 'the file has changed on the hub', this.#place, {
      actual,
      rule: 'all parts of a file belong to the content that the commit lists',
      remedy: 'load again; if it persists, the hub or a proxy before it serves wrong files',
    })
  }

  #malformed(what: string, actual: Readonly<Record<string, unknown>>) {
    return hubError('HUB_RESPONSE', what, this.#place, { actual, remedy: 'check HF_ENDPOINT and proxies' })
  }
}
