import { readFile } from 'node:fs/promises'
import { homedir } from 'node:os'
import { join, resolve } from 'node:path'
import { RankwiseError } from '../errors.ts'
import type { Environment } from '../rendezvous.ts'
import type { HubOptions, RetryPolicy } from './hub-options.ts'

/** What options and environment come to. The token is not among it, so that nothing that is printed holds it. */
export interface HubSettings {
  /** Without a slash at its end. */
  readonly endpoint: string
  /** Absolute. */
  readonly cacheDir: string
  readonly offline: boolean
  readonly timeoutMs: number
  readonly retry: RetryPolicy
}

const DEFAULT_ENDPOINT = 'https://huggingface.co'
const DEFAULT_TIMEOUT_SECONDS = 10
const MAX_TIMEOUT_SECONDS = 86_400
const DEFAULT_RETRY: RetryPolicy = { attempts: 6, delayMs: 500, maxDelayMs: 60_000 }

/**
 * Settings by the rules of Python's `huggingface_hub` (`constants.py`), so that both use one cache and one login.
 *
 * @throws RankwiseError `HUB_ENDPOINT`, `HUB_OPTION`
 */
export function hubSettings(options: HubOptions): HubSettings {
  const { env = process.env } = options
  const retry = { ...DEFAULT_RETRY, ...options.retry }
  requireInteger('retry.attempts', retry.attempts, 1, 100)
  requireInteger('retry.delayMs', retry.delayMs, 0, MAX_TIMEOUT_SECONDS * 1000)
  requireInteger('retry.maxDelayMs', retry.maxDelayMs, 0, MAX_TIMEOUT_SECONDS * 1000)
  const timeoutMs = options.timeoutMs ?? timeoutSeconds(env) * 1000
  requireInteger('timeoutMs', timeoutMs, 1, MAX_TIMEOUT_SECONDS * 1000)
  return {
    endpoint: endpointOf(options.endpoint ?? present(env.HF_ENDPOINT) ?? DEFAULT_ENDPOINT),
    cacheDir: resolve(options.cacheDir === undefined ? defaultCacheDir(env) : expand(options.cacheDir, env)),
    offline: options.localFilesOnly ?? isTrue(present(env.HF_HUB_OFFLINE) ?? env.TRANSFORMERS_OFFLINE),
    timeoutMs,
    retry,
  }
}

/** The token to send: of the options, of the environment, or of the file that a login left; undefined for none. */
export async function hubToken({ token, env = process.env }: HubOptions): Promise<string | undefined> {
  if (token === false) return undefined
  if (token !== undefined) return requireToken(token, 'the option token')
  if (isTrue(env.HF_HUB_DISABLE_IMPLICIT_TOKEN)) return undefined
  const variable = present(env.HF_TOKEN) ?? present(env.HUGGING_FACE_HUB_TOKEN)
  if (variable !== undefined) return requireToken(variable, 'the variable HF_TOKEN')
  const path = expand(present(env.HF_TOKEN_PATH) ?? join(hubHome(env), 'token'), env)
  const text = present(await readTokenFile(path))
  return text === undefined ? undefined : requireToken(text, path)
}

function hubHome(env: Environment): string {
  const cache = present(env.XDG_CACHE_HOME) ?? join(homedir(), '.cache')
  return expand(present(env.HF_HOME) ?? join(cache, 'huggingface'), env)
}

function defaultCacheDir(env: Environment): string {
  const cacheDir = present(env.HF_HUB_CACHE) ?? present(env.HUGGINGFACE_HUB_CACHE)
  return cacheDir === undefined ? join(hubHome(env), 'hub') : expand(cacheDir, env)
}

/** `~`, `$NAME` and `${NAME}` at their places in a path; a variable that is not set stays as it is written. */
function expand(path: string, env: Environment): string {
  const home = /^~(?=[/\\]|$)/.test(path) ? join(homedir(), path.slice(1)) : path
  return home.replace(/\$(?:\{(\w+)\}|(\w+))/g, (text, braced, bare) => env[braced ?? bare] ?? text)
}

/** The address is not quoted in the error: it may hold a password. */
function endpointOf(text: string): string {
  const url = URL.canParse(text) ? new URL(text) : undefined
  const isWeb = url?.protocol === 'https:' || url?.protocol === 'http:'
  if (url !== undefined && isWeb && url.username === '' && url.password === '' && url.search === '') {
    return `${url.origin}${url.pathname}`.replace(/\/+$/, '')
  }
  throw new RankwiseError('HUB_ENDPOINT', 'the address of the hub is malformed', {
    where: 'endpoint, HF_ENDPOINT',
    rule: 'an endpoint is an http or https address without user, password and query',
  })
}

function timeoutSeconds(env: Environment): number {
  const text = present(env.HF_HUB_DOWNLOAD_TIMEOUT)
  if (text === undefined) return DEFAULT_TIMEOUT_SECONDS
  const seconds = /^\d{1,6}$/.test(text) ? Number(text) : Number.NaN
  requireInteger('HF_HUB_DOWNLOAD_TIMEOUT', seconds, 1, MAX_TIMEOUT_SECONDS)
  return seconds
}

/** @throws RankwiseError `HUB_OPTION` */
export function requireInteger(name: string, value: number, min: number, max: number): void {
  if (Number.isInteger(value) && value >= min && value <= max) return
  throw new RankwiseError('HUB_OPTION', `${name} is out of range`, {
    actual: { [name]: value },
    rule: `${name} is an integer from ${min} to ${max}`,
  })
}

async function readTokenFile(path: string): Promise<string> {
  try {
    return await readFile(path, 'utf8')
  } catch (cause) {
    if ((cause as NodeJS.ErrnoException).code === 'ENOENT') return ''
    throw new RankwiseError('HUB_TOKEN', 'the file of the access token cannot be read', {
      where: path,
      actual: { problem: (cause as NodeJS.ErrnoException).code },
      remedy: 'check HF_TOKEN_PATH and its permissions; pass token: false to send none',
    })
  }
}

/** What is not a header value would be quoted by the error of `fetch`. */
function requireToken(text: string, source: string): string {
  const token = text.trim()
  if (/^[\x21-\x7e]+$/.test(token)) return token
  throw new RankwiseError('HUB_TOKEN', 'the access token is malformed', {
    where: source,
    rule: 'a token is printable ASCII without spaces',
    remedy: 'copy it again from the settings of your account; pass token: false to send none',
  })
}

function present(text: string | undefined): string | undefined {
  const trimmed = text?.trim()
  return trimmed === '' ? undefined : trimmed
}

function isTrue(text: string | undefined): boolean {
  return ['1', 'ON', 'YES', 'TRUE'].includes((text ?? '').toUpperCase())
}
