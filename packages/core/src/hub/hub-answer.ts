import { type HubPlace, hubError } from './hub-error.ts'
import type { StallGuard } from './stall-guard.ts'

/** What the hub itself says about a file, be it in the answer that redirects to the storage. */
export interface HubLink {
  /** Hash of the content. */
  readonly linkedEtag?: string
  readonly commit?: string
}

/** An answer with content. It has to be read, or closed. */
export class HubAnswer {
  readonly status: number
  readonly headers: Headers
  /** Where the content comes from, after redirects. */
  readonly url: URL
  readonly link: HubLink
  readonly #body: ReadableStream<Uint8Array> | null
  readonly #guard: StallGuard

  constructor(response: Response, url: URL, link: HubLink, guard: StallGuard) {
    this.status = response.status
    this.headers = response.headers
    this.url = url
    this.link = link
    this.#body = response.body
    this.#guard = guard
  }

  /** The content as it arrives. Leaving the loop ends the transfer. @throws TransientError, RankwiseError `ABORTED` */
  async *chunks(): AsyncGenerator<Uint8Array> {
    if (this.#body === null) return
    const reader = this.#body.getReader()
    try {
      for (;;) {
        const { done, value } = await this.#guard.next(reader.read(), (part) => part.value?.length ?? 0)
        if (done) return
        yield value
      }
    } finally {
      await reader.cancel().catch(() => undefined)
    }
  }

  /** All of the content. @throws TransientError, RankwiseError `HUB_RESPONSE` when it is longer than `maxBytes` */
  async bytes(maxBytes: number, place: HubPlace): Promise<Uint8Array<ArrayBuffer>> {
    const parts: Uint8Array[] = []
    let length = 0
    for await (const chunk of this.chunks()) {
      length += chunk.length
      if (length > maxBytes) {
        throw hubError('HUB_RESPONSE', 'the answer is too long', place, { actual: { longest: maxBytes } })
      }
      parts.push(chunk)
    }
    const bytes = new Uint8Array(length)
    let position = 0
    for (const part of parts) {
      bytes.set(part, position)
      position += part.length
    }
    return bytes
  }

  /** Ends the transfer. */
  async close(): Promise<void> {
    await this.#body?.cancel().catch(() => undefined)
  }
}

/** Reads what the hub says about a file. */
export function linkOf(headers: Headers): HubLink {
  const linkedEtag = etagOf(headers.get('x-linked-etag'))
  const commit = headers.get('x-repo-commit')
  return { ...(linkedEtag === undefined ? {} : { linkedEtag }), ...(commit === null ? {} : { commit }) }
}

/** The tag without quotes and without its mark of weakness, as `huggingface_hub` names blobs. */
export function etagOf(header: string | null): string | undefined {
  const etag = header
    ?.trim()
    .replace(/^W\//, '')
    .replace(/^"(.*)"$/, '$1')
  return etag === '' ? undefined : etag
}
