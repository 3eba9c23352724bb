import { mkdir, open, readdir, readFile } from 'node:fs/promises'
import { join } from 'node:path'
import { onTestFinished, vi } from 'vitest'
import { temporaryFolder } from '../checkpoint/files.ts'

/** Everything in a folder, by path: content of files, what links point to is not followed for folders. */
export async function snapshot(folder: string): Promise<ReadonlyMap<string, string>> {
  const entries = await readdir(folder, { withFileTypes: true, recursive: true })
  const found = await Promise.all(
    entries.map(async (entry) => {
      const path = join(entry.parentPath ?? entry.path, entry.name)
      const content = entry.isDirectory() ? 'folder' : (await readFile(path)).toString('base64')
      return [path.slice(folder.length + 1), content] as const
    }),
  )
  return new Map(found.sort(([a], [b]) => (a < b ? -1 : 1)))
}

/** Makes the disk full: writing fails from `bytes` on. */
export async function fillDiskAfter(bytes: number): Promise<void> {
  const prototype = await fileHandlePrototype()
  const write = prototype.write
  let left = bytes
  const spy = vi.spyOn(prototype, 'write').mockImplementation(async function (this: object, ...args: unknown[]) {
    left -= args[2] as number
    if (left < 0) throw Object.assign(new Error('ENOSPC: no space left on device, write'), { code: 'ENOSPC' })
    return Reflect.apply(write, this, args)
  })
  onTestFinished(() => spy.mockRestore())
}

/** Makes the disk fail when files are made to reach it. */
export async function failSync(): Promise<void> {
  const fail = () => Promise.reject(Object.assign(new Error('EIO: i/o error, fsync'), { code: 'EIO' }))
  const spy = vi.spyOn(await fileHandlePrototype(), 'sync').mockImplementation(fail)
  onTestFinished(() => spy.mockRestore())
}

/** Does something whenever a file is made to reach the disk; `count` counts from 1. */
export async function onSync(action: (count: number) => void): Promise<void> {
  let count = 0
  const spy = vi.spyOn(await fileHandlePrototype(), 'sync').mockImplementation(async () => action(++count))
  onTestFinished(() => spy.mockRestore())
}

/** Makes the disk take at most `bytes` of a write. */
export async function shortenWrites(bytes: number): Promise<void> {
  const prototype = await fileHandlePrototype()
  const write = prototype.write
  const spy = vi.spyOn(prototype, 'write').mockImplementation(async function (this: object, ...args: unknown[]) {
    const [data, position, length] = args as [Uint8Array, number, number]
    return Reflect.apply(write, this, [data, position, Math.min(bytes, length)])
  })
  onTestFinished(() => spy.mockRestore())
}

/** Leaves out waiting for the disk, where a test saves hundreds of times. */
export async function skipSync(): Promise<void> {
  const spy = vi.spyOn(await fileHandlePrototype(), 'sync').mockResolvedValue()
  onTestFinished(() => spy.mockRestore())
}

interface FileHandlePrototype {
  write(...args: unknown[]): Promise<unknown>
  sync(): Promise<void>
}

async function fileHandlePrototype(): Promise<FileHandlePrototype> {
  const folder = await temporaryFolder()
  await mkdir(join(folder, 'handles'))
  await using handle = await open(join(folder, 'handles', 'any'), 'w')
  return Object.getPrototypeOf(handle)
}
