import { mkdtemp, readdir, readlink, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { expect, onTestFinished } from 'vitest'
import { RankwiseError } from '../../src/errors.ts'

/** A folder that is removed when the test ends. */
export async function temporaryFolder(): Promise<string> {
  const folder = await mkdtemp(join(tmpdir(), 'rankwise-'))
  onTestFinished(() => rm(folder, { recursive: true, force: true }))
  return folder
}

/** The bytes of a safetensors file, header as given: no check, no padding, no order. */
export function rawFile(header: object | string | Uint8Array, data: Uint8Array = new Uint8Array(0)): Buffer {
  const text = rawHeader(header)
  const length = Buffer.alloc(8)
  length.writeBigUInt64LE(BigInt(text.length))
  return Buffer.concat([length, text, data])
}

export async function writeRaw(folder: string, name: string, ...content: Parameters<typeof rawFile>): Promise<string> {
  const path = join(folder, name)
  await writeFile(path, rawFile(...content))
  return path
}

/** Expects an error with `code` whose message holds all of `texts`. */
export async function expectCode(
  action: () => unknown,
  code: string,
  ...texts: readonly (string | number | bigint)[]
): Promise<void> {
  const error = await Promise.resolve()
    .then(action)
    .then(
      () => undefined,
      (thrown: unknown) => thrown,
    )
  expect(error, `expected ${code}, and nothing was thrown`).toBeInstanceOf(RankwiseError)
  expect((error as RankwiseError).code).toBe(code)
  for (const text of texts) expect((error as RankwiseError).message).toContain(String(text))
}

/** `length` bytes that differ from their neighbours and from those a row away. */
export function patternBytes(length: number): Uint8Array {
  return Uint8Array.from({ length }, (_, i) => (i * 167 + (i >>> 8) * 13 + (i >>> 16)) & 0xff)
}

/** How many files below `folder` this process has open. Linux tells; elsewhere the answer is 0. */
export async function openFiles(folder: string): Promise<number> {
  if (process.platform !== 'linux') return 0
  const descriptors = await readdir('/proc/self/fd')
  const paths = await Promise.all(descriptors.map((fd) => readlink(`/proc/self/fd/${fd}`).catch(() => '')))
  return paths.filter((path) => path.startsWith(folder)).length
}

function rawHeader(header: object | string | Uint8Array): Buffer {
  if (header instanceof Uint8Array) return Buffer.from(header)
  return Buffer.from(typeof header === 'string' ? header : JSON.stringify(header))
}
