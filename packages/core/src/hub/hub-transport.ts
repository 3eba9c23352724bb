import { throwIfAborted } from '../abort.ts'
import type { RankwiseError } from '../errors.ts'
import { HubAnswer, linkOf } from './hub-answer.ts'
import { type HubPlace, hubError } from './hub-error.ts'
import type { HubSettings } from './hub-settings.ts'
import { type RetryOptions, retryAfterOf, retrying } from './retry.ts'
import { StallGuard } from './stall-guard.ts'
import { TransientError } from './transient-error.ts'

/** What a request is for, and what may end it. */
export interface HubRequest {
  readonly place: HubPlace
  readonly headers?: Readonly<Record<string, string>>
  readonly signal?: AbortSignal | undefined
}

const MAX_REDIRECTS = 5

/** Longest answer of the API: the listing of a repository has a page of 1000 files in about 300 KB. */
const MAX_API_BYTES = 64 * 1024 * 1024

/** Most pages of one listing. */
const MAX_API_PAGES = 200

const TRANSIENT_STATUS: ReadonlySet<number> = new Set([408, 425, 429, 500, 502, 503, 504])

/** What the hub says in `X-Error-Code` (`hf_raise_for_status` of huggingface_hub). Nothing else is repeated. */
const ERROR_CODES = ['RepoNotFound', 'RevisionNotFound', 'EntryNotFound', 'GatedRepo'] as const

/** Sends requests to a hub. The token goes to the hub's own origin, and never where a redirect leads. */
export class HubTransport {
  readonly settings: HubSettings
  readonly #origin: string
  readonly #token: string | undefined

  constructor(settings: HubSettings, token: string | undefined) {
    this.settings = settings
    this.#origin = new URL(settings.endpoint).origin
    this.#token = token
  }

  /**
   * One attempt of a GET. Redirects are followed by hand: `fetch` would hide what the hub says about the file in the
   * answer that redirects.
   *
   * @throws TransientError when another attempt may help; RankwiseError `HUB_UNAUTHORIZED`, `HUB_NOT_FOUND`,
   *   `HUB_CHANGED`, `HUB_RESPONSE`, `ABORTED`
   */
  async get(address: string | URL, request: HubRequest): Promise<HubAnswer> {
    const guard = new StallGuard(this.settings.timeoutMs, request.signal)
    let url = new URL(address)
    let link = {}
    for (let hop = 0; hop <= MAX_REDIRECTS; hop++) {
      const response = await this.#send(url, request, guard)
      if (url.origin === this.#origin) link = { ...link, ...linkOf(response.headers) }
      const location = isRedirect(response) ? response.headers.get('location') : null
      if (location === null) {
        if (!response.ok) throw await this.#refusal(url, response, request.place)
        return new HubAnswer(response, url, link, guard)
      }
      await discard(response)
      url = this.#redirected(url, location, request.place)
    }
    throw hubError('HUB_RESPONSE', 'the hub redirects without end', request.place, {
      actual: { host: url.host, redirects: MAX_REDIRECTS },
    })
  }

  /** `fetch` for one call of `@huggingface/hub`: answers come whole and are JSON, or the request is sent again. */
  apiFetch(place: HubPlace, { signal, policy }: Pick<RetryOptions, 'signal' | 'policy'>): typeof fetch {
    let pages = 0
    return async (input, init) => {
      if (++pages > MAX_API_PAGES) throw hubError('HUB_RESPONSE', 'the listing has no end', place)
      return retrying(
        async () => {
          const headers = Object.fromEntries(new Headers(init?.headers))
          const answer = await this.get(input instanceof Request ? input.url : input, { place, headers, signal })
          const body = await answer.bytes(MAX_API_BYTES, place)
          requireJson(body)
          const next = answer.headers.get('link')
          return new Response(body, next === null ? {} : { headers: { link: next } })
        },
        { policy, place, signal },
      )
    }
  }

  async #send(url: URL, { headers = {}, place, signal }: HubRequest, guard: StallGuard): Promise<Response> {
    throwIfAborted(signal, place.repo)
    const token = url.origin === this.#origin ? this.#token : undefined
    const authorization = token === undefined ? {} : { authorization: `Bearer ${token}` }
    const request = fetch(url, {
      headers: { 'user-agent': 'rankwise', ...headers, ...authorization },
      redirect: 'manual',
      signal: guard.signal,
    })
    return guard.next(request, () => 0)
  }

  /** Encrypted stays encrypted. */
  #redirected(from: URL, location: string, place: HubPlace): URL {
    const url = URL.canParse(location, from.href) ? new URL(location, from) : undefined
    const isAllowed = url?.protocol === 'https:' || (url?.protocol === 'http:' && from.protocol === 'http:')
    if (url !== undefined && isAllowed && url.username === '' && url.password === '') return url
    throw hubError('HUB_RESPONSE', 'the hub redirects to an address that is not allowed', place, {
      actual: { host: from.host },
      rule: 'redirects lead to https addresses without user and password',
    })
  }

  async #refusal(url: URL, response: Response, place: HubPlace): Promise<TransientError | RankwiseError> {
    await discard(response)
    const { status, headers } = response
    // Signed addresses of the storage expire: the next attempt asks the hub for a new one.
    const isExpired = url.origin !== this.#origin && (status === 401 || status === 403)
    if (isExpired || TRANSIENT_STATUS.has(status)) {
      return new TransientError(`status ${status} from ${url.host}`, { status, retryAfterMs: retryAfterOf(headers) })
    }
    const errorCode = ERROR_CODES.find((code) => code === headers.get('x-error-code'))
    const actual = { status, host: url.host, ...(errorCode === undefined ? {} : { errorCode }) }
    if (status === 401 || status === 403) return this.#unauthorized(place, actual, errorCode)
    if (status === 404) {
      return hubError('HUB_NOT_FOUND', notFound(errorCode), place, {
        actual,
        remedy: 'check the id, the revision and the subfolder on the web page of the repository',
      })
    }
    if (status === 412 || status === 416) {
      return hubError('HUB_CHANGED', 'the file has changed on the hub', place, {
        actual,
        remedy: 'load again; give a commit as revision to be independent of changes',
      })
    }
    return hubError('HUB_RESPONSE', 'the hub refuses the request', place, { actual, remedy: 'check HF_ENDPOINT' })
  }

  #unauthorized(place: HubPlace, actual: Readonly<Record<string, unknown>>, errorCode: string | undefined) {
    const page = `${this.settings.endpoint}/${place.repo}`
    const isGated = errorCode === 'GatedRepo'
    const what = isGated
      ? 'access to the repository has to be granted first'
      : 'the repository does not exist, or the token may not read it'
    return hubError('HUB_UNAUTHORIZED', what, place, {
      actual: { ...actual, token: this.#token === undefined ? 'none sent' : 'sent, not shown' },
      remedy: isGated
        ? `accept the conditions on ${page} and pass a token of that account`
        : 'check the id; for a private repository pass a token that may read it, by HF_TOKEN or the option token',
    })
  }
}

function notFound(errorCode: string | undefined): string {
  if (errorCode === 'RevisionNotFound') return 'the repository has no such revision'
  return errorCode === 'EntryNotFound' ? 'the repository has no such file' : 'there is no such repository'
}

function isRedirect({ status }: Response): boolean {
  return [301, 302, 303, 307, 308].includes(status)
}

function requireJson(body: Uint8Array): void {
  try {
    JSON.parse(new TextDecoder().decode(body))
  } catch {
    throw new TransientError('the answer is not JSON')
  }
}

async function discard({ body }: Response): Promise<void> {
  await body?.cancel().catch(() => undefined)
}
