import type { IncomingMessage, ServerResponse } from 'node:http'

/** What goes wrong with an answer. */
export type Fault =
  | { readonly kind: 'drop'; readonly after: number }
  | { readonly kind: 'hang'; readonly after: number }
  | { readonly kind: 'drip' }
  | { readonly kind: 'status'; readonly status: number; readonly headers?: Readonly<Record<string, string>> }
  | { readonly kind: 'garbage' }
  | { readonly kind: 'text' }
  | { readonly kind: 'noRanges' }
  | { readonly kind: 'wrongRange' }
  | { readonly kind: 'longerLength' }
  | { readonly kind: 'extra' }
  | { readonly kind: 'corrupt' }
  | { readonly kind: 'headers'; readonly headers: Readonly<Record<string, string>> }

/** What a server means to send. */
export interface Answer {
  readonly status: number
  readonly headers?: Readonly<Record<string, string>>
  readonly body?: Buffer
}

/** One request, and what was sent in return. */
export interface RequestLog {
  /** Where it goes: the API, the address of a file on the hub, or the storage behind it. */
  readonly kind: 'api' | 'hub' | 'storage'
  readonly path: string
  readonly range: string | undefined
  readonly headers: IncomingMessage['headers']
  status: number
  /** Bytes of the body that were written. */
  bytes: number
}

/** A file as the request asks for it: whole, or a range of it. */
export function rangeOf(content: Buffer, etag: string, { headers }: RequestLog, fault: Fault | undefined): Answer {
  const tag = fault?.kind === 'headers' ? (fault.headers.etag ?? etag) : etag
  const common = { etag: tag, 'accept-ranges': 'bytes' }
  const range = /^bytes=(\d+)-(\d+)$/.exec(headers.range ?? '')
  const condition = headers['if-range']
  const isOther = condition !== undefined && condition !== tag
  if (range === null || isOther || fault?.kind === 'noRanges') return { status: 200, headers: common, body: content }
  const start = Number(range[1]) + (fault?.kind === 'wrongRange' ? 1 : 0)
  const end = Math.min(Number(range[2]) + 1, content.length)
  if (start >= content.length) return { status: 416, headers: { 'content-range': `bytes */${content.length}` } }
  const contentRange = `bytes ${start}-${end - 1}/${content.length}`
  return { status: 206, headers: { ...common, 'content-range': contentRange }, body: content.subarray(start, end) }
}

/** Sends an answer as the fault has it, and notes what was sent. */
export function send(response: ServerResponse, answer: Answer, log: RequestLog, fault: Fault | undefined): void {
  const { status, headers, body } = withFault(answer, fault)
  log.status = status
  if (fault?.kind === 'garbage') {
    response.socket?.end('\x00\x01 this is not HTTP\r\n\r\n')
    return
  }
  const length = body.length + (fault?.kind === 'longerLength' ? 1 : 0)
  response.writeHead(status, { ...headers, 'content-length': String(length) })
  if (response.req.method === 'HEAD') response.end()
  else if (fault?.kind === 'drip') drip(response, body, log)
  else sendBody(response, body, log, fault)
}

function withFault(
  { status, headers = {}, body = Buffer.alloc(0) }: Answer,
  fault: Fault | undefined,
): Required<Answer> {
  switch (fault?.kind) {
    case 'status':
      return { status: fault.status, headers: fault.headers ?? {}, body: Buffer.alloc(0) }
    case 'headers':
      return { status, headers: { ...headers, ...fault.headers }, body }
    case 'text':
      return { status: 200, headers: {}, body: Buffer.from('<html>sign in to the network of the hotel</html>') }
    case 'extra':
      return { status, headers, body: Buffer.concat([body, Buffer.alloc(100, 'x')]) }
    case 'corrupt':
      return { status, headers, body: Buffer.from(body.map((byte, i) => (i % 97 === 5 ? byte ^ 1 : byte))) }
    default:
      return { status, headers, body }
  }
}

function sendBody(response: ServerResponse, body: Buffer, log: RequestLog, fault: Fault | undefined): void {
  const part = fault?.kind === 'drop' || fault?.kind === 'hang' ? body.subarray(0, fault.after) : body
  log.bytes += part.length
  if (fault?.kind === 'drop') response.write(part, () => response.socket?.destroy())
  else if (fault?.kind === 'longerLength') response.write(part, () => response.socket?.end())
  else if (fault?.kind === 'hang') response.write(part)
  else response.end(part)
}

/** A byte at a time. */
function drip(response: ServerResponse, body: Buffer, log: RequestLog): void {
  let position = 0
  const timer = setInterval(() => {
    if (position < body.length) response.write(body.subarray(position, position + 1))
    else response.end()
    if (position === body.length) clearInterval(timer)
    log.bytes = position
    position++
  }, 5)
  response.once('close', () => clearInterval(timer))
}
