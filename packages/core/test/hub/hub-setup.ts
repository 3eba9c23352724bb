import { readdir } from 'node:fs/promises'
import { referencePath } from '../../../fixtures/src/reference.ts'
import { type HubOptions, HubRepository } from '../../src/hub/index.ts'
import { temporaryFolder } from '../checkpoint/files.ts'
import { HubServer, repoOf, sha256 } from './hub-server.ts'

export const ID = 'org/flux2-klein-tiny'

/** What a pipeline needs. */
export const PIPELINE = {
  files: ['model_index.json'],
  folders: ['scheduler', 'tokenizer', 'text_encoder', 'transformer', 'vae'],
}

/** A hub with the tiny pipeline, an empty cache, and options that find both and wait for nothing long. */
export async function hubWithPipeline() {
  const server = await HubServer.start()
  const repo = await repoOf(referencePath('flux2-klein-tiny'))
  server.repos.set(ID, repo)
  const cacheDir = await temporaryFolder()
  return { server, repo, cacheDir, options: optionsFor(server, cacheDir) }
}

/** Options without the environment of whoever runs the tests. */
export function optionsFor({ endpoint }: HubServer, cacheDir: string): HubOptions {
  const retry = { attempts: 6, delayMs: 1, maxDelayMs: 1000 }
  return { endpoint, cacheDir, env: {}, token: false, retry, timeoutMs: 2000 }
}

/** Opens and downloads. */
export async function downloadPipeline(options: HubOptions): Promise<string> {
  return (await HubRepository.open(ID, options)).download(PIPELINE)
}

/** SHA-256 of the files of a folder, links followed, by path. */
export async function hashesOf(folder: string): Promise<Map<string, string>> {
  const { files } = await repoOf(folder)
  return hashes(files)
}

/** SHA-256 of some contents, by path. */
export function hashes(files: ReadonlyMap<string, Uint8Array>): Map<string, string> {
  return new Map([...files.keys()].sort().map((path) => [path, sha256(files.get(path) as Uint8Array)]))
}

/** Names of what is left in the cache beside complete files. */
export async function leftovers(cacheDir: string): Promise<readonly string[]> {
  const names = await readdir(cacheDir, { recursive: true })
  return names.filter((name) => /incomplete|\.lock$|\.tmp$/.test(name))
}
