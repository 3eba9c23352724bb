import { createHash, type Hash } from 'node:crypto'
import { once } from 'node:events'
import { readdir, readFile } from 'node:fs/promises'
import { createServer, type IncomingMessage, type Server, type ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'
import { join, relative } from 'node:path'
import { onTestFinished } from 'vitest'
import { type Answer, type Fault, type RequestLog, rangeOf, send } from './faulty-answer.ts'

/** What the server answers for. */
export interface HubRepo {
  readonly commit: string
  /** By paths in the repository. */
  readonly files: Map<string, Buffer>
  /** Needs this token. */
  readonly token?: string
  /** Knows the token, and refuses all the same. */
  readonly gated?: boolean
}

/** A hub on this machine: the API, files, and a storage of another origin, as `@huggingface/hub` and Python use them. */
export class HubServer {
  readonly repos = new Map<string, HubRepo>()
  readonly log: RequestLog[] = []
  /** Connections to the storage. */
  connections = 0
  /** Entries of one page of a listing. */
  pageSize = 1000
  /** Files from this size on are in the storage, as those of git LFS. */
  lfsFrom = 1024
  /** Decides what goes wrong, request by request. */
  fault: (request: RequestLog) => Fault | undefined = () => undefined
  /** Changes a listing before it is sent. */
  tamper: (entries: readonly Record<string, unknown>[]) => unknown = (entries) => entries
  readonly #hub: Server
  readonly #storage: Server

  private constructor() {
    this.#hub = createServer((request, response) => this.#handle(request, response, 'hub'))
    this.#storage = createServer((request, response) => this.#handle(request, response, 'storage'))
    this.#storage.on('connection', () => {
      this.connections++
    })
  }

  /** A server that ends with the test. */
  static async start(): Promise<HubServer> {
    const server = new HubServer()
    for (const part of [server.#hub, server.#storage]) {
      part.listen(0, '127.0.0.1')
      await once(part, 'listening')
    }
    onTestFinished(() => server.stop())
    return server
  }

  async stop(): Promise<void> {
    for (const part of [this.#hub, this.#storage]) {
      if (!part.listening) continue
      part.close()
      part.closeAllConnections()
      await once(part, 'close')
    }
  }

  get endpoint(): string {
    return address(this.#hub)
  }

  /** Requests of a kind, for paths that contain something. */
  requests(kind: RequestLog['kind'], containing = ''): readonly RequestLog[] {
    return this.log.filter((request) => request.kind === kind && request.path.includes(containing))
  }

  /** Bytes of bodies that were sent in answer to such requests. */
  bytes(kind: RequestLog['kind'], containing = ''): number {
    return this.requests(kind, containing).reduce((sum, { bytes }) => sum + bytes, 0)
  }

  #handle(request: IncomingMessage, response: ServerResponse, origin: 'hub' | 'storage'): void {
    const url = new URL(request.url ?? '/', this.endpoint)
    const path = decodeURIComponent(url.pathname)
    const kind = origin === 'hub' && path.startsWith('/api/') ? 'api' : origin
    const { headers } = request
    const log: RequestLog = { kind, path, range: headers.range, headers, status: 0, bytes: 0 }
    this.log.push(log)
    const fault = this.fault(log)
    send(response, kind === 'storage' ? this.#stored(log, fault) : this.#answer(url, log, fault), log, fault)
  }

  #answer(url: URL, log: RequestLog, fault: Fault | undefined): Answer {
    const pattern = /^(?:\/api\/models)?\/([^/]+\/[^/]+)\/(revision|tree|resolve)\/([^/]+)(?:\/(.*))?$/
    const [, name = '', what, revision, path = ''] = pattern.exec(log.path) ?? []
    const repo = this.repos.get(name)
    const token = /^Bearer (.*)$/.exec(log.headers.authorization ?? '')?.[1]
    if (repo === undefined || (repo.token !== undefined && repo.token !== token)) {
      return refusal(token === undefined ? 401 : 404, 'RepoNotFound')
    }
    if (repo.gated === true) return refusal(403, 'GatedRepo')
    if (revision !== 'main' && revision !== repo.commit) return refusal(404, 'RevisionNotFound')
    if (what === 'revision') return json({ _id: 'id', id: name, sha: repo.commit, private: false })
    return what === 'tree' ? this.#tree(repo, url) : this.#file(repo, path, log, fault)
  }

  #tree({ files }: HubRepo, url: URL): Answer {
    const start = Number(url.searchParams.get('cursor') ?? 0)
    const end = start + this.pageSize
    const entries = [...files].slice(start, end).map(([path, content]) => {
      const { length: size } = content
      const lfs = { oid: sha256(content), size, pointerSize: 130 }
      const large = size >= this.lfsFrom ? { lfs, xetHash: sha256(content) } : {}
      return { type: 'file', path, size, oid: gitOid(content), ...large }
    })
    const next = new URL(url)
    next.searchParams.set('cursor', String(end))
    const headers = end < files.size ? { link: `<${next.href}>; rel="next"` } : {}
    return json(this.tamper([{ type: 'directory', path: 'folder', oid: 'x', size: 0 }, ...entries]), headers)
  }

  #file({ files, commit }: HubRepo, path: string, log: RequestLog, fault: Fault | undefined): Answer {
    const content = files.get(path)
    if (content === undefined) return refusal(404, 'EntryNotFound')
    const etag = `"${gitOid(content)}"`
    if (content.length < this.lfsFrom) {
      const answer = rangeOf(content, etag, log, fault)
      return { ...answer, headers: { ...answer.headers, 'x-repo-commit': commit } }
    }
    const headers = {
      location: `${address(this.#storage)}/${sha256(content)}?X-Signature=signed-secret`,
      etag,
      'x-linked-etag': `"${sha256(content)}"`,
      'x-linked-size': String(content.length),
      'x-repo-commit': commit,
    }
    return { status: 302, headers }
  }

  #stored(log: RequestLog, fault: Fault | undefined): Answer {
    const contents = [...this.repos.values()].flatMap(({ files }) => [...files.values()])
    const content = contents.find((bytes) => sha256(bytes) === log.path.slice(1))
    if (content === undefined) return { status: 403 }
    return rangeOf(content, `"storage-${sha256(content).slice(0, 20)}"`, log, fault)
  }
}

export function sha256(content: Uint8Array): string {
  return remembered(sha256Hashes, content, () => createHash('sha256').update(content))
}

/** What git calls a content. */
export function gitOid(content: Uint8Array): string {
  return remembered(gitHashes, content, () => createHash('sha1').update(`blob ${content.length}\0`).update(content))
}

const sha256Hashes = new WeakMap<Uint8Array, string>()
const gitHashes = new WeakMap<Uint8Array, string>()

function remembered(known: WeakMap<Uint8Array, string>, content: Uint8Array, hash: () => Hash): string {
  const digest = known.get(content) ?? hash().digest('hex')
  known.set(content, digest)
  return digest
}

/** The files of a folder, as a repository. */
export async function repoOf(folder: string, commit = 'a'.repeat(40)): Promise<HubRepo> {
  const entries = await readdir(folder, { recursive: true, withFileTypes: true })
  const files = new Map<string, Buffer>()
  for (const entry of entries.filter((dirent) => !dirent.isDirectory())) {
    const path = join(entry.parentPath, entry.name)
    files.set(relative(folder, path), await readFile(path))
  }
  return { commit, files }
}

function refusal(status: number, errorCode: string): Answer {
  return { status, headers: { 'x-error-code': errorCode } }
}

function json(value: unknown, headers: Readonly<Record<string, string>> = {}): Answer {
  return {
    status: 200,
    headers: { 'content-type': 'application/json', ...headers },
    body: Buffer.from(JSON.stringify(value)),
  }
}

function address(server: Server): string {
  return `http://127.0.0.1:${(server.address() as AddressInfo).port}`
}
