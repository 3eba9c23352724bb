import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { mkdir, readdir, readFile, utimes, writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import { describe, expect, it } from 'vitest'
import { FileLock } from '../../src/hub/file-lock.ts'
import { expectCode, temporaryFolder } from '../checkpoint/files.ts'

async function lockPath(): Promise<string> {
  return join(await temporaryFolder(), 'locks', 'a.lock')
}

describe('FileLock', () => {
  it('is held by one at a time, and leaves nothing', async () => {
    const path = await lockPath()
    let holders = 0
    let most = 0
    const work = async () => {
      await using _ = await FileLock.acquire(path, { pollMs: 1 })
      most = Math.max(most, ++holders)
      await new Promise((resolve) => setTimeout(resolve, 5))
      holders--
    }
    await Promise.all(Array.from({ length: 8 }, work))
    expect(most).toBe(1)
    expect(await readdir(join(path, '..'))).toEqual([])
  })

  it('waits for an owner that lives, until it is aborted', async () => {
    const path = await lockPath()
    await using owner = await FileLock.acquire(path)
    const waiting = FileLock.acquire(path, { pollMs: 5, signal: AbortSignal.timeout(100) })
    await expectCode(() => waiting, 'ABORTED')
    expect(owner.isTakenFromSilence).toBe(false)
    expect(await readdir(join(path, '..'))).toEqual(['a.lock'])
  })

  it('goes to the next when its owner has died, at once', async () => {
    const path = await lockPath()
    await mkdir(join(path, '..'))
    const self = await ownText(path)
    const child = spawn(process.execPath, ['-e', ''])
    await once(child, 'exit')
    await writeFile(path, JSON.stringify({ ...self, id: 'dead', pid: child.pid }))
    await using lock = await FileLock.acquire(path, { pollMs: 1 })
    expect(lock.isTakenFromSilence).toBe(false)
  })

  it.runIf(process.platform === 'linux')('notices that another process has the id of its owner', async () => {
    const path = await lockPath()
    await mkdir(join(path, '..'))
    await writeFile(path, JSON.stringify({ ...(await ownText(path)), id: 'before', started: '1' }))
    await using lock = await FileLock.acquire(path, { pollMs: 1 })
    expect(lock.isTakenFromSilence).toBe(false)
  })

  it.each([
    ['on another machine', { pid: 1, machine: 'elsewhere', id: 'x' }],
    ['that nobody can read', undefined],
  ])('is taken over from an owner %s once it is silent', async (_, owner) => {
    const path = await lockPath()
    await mkdir(join(path, '..'))
    await writeFile(path, owner === undefined ? '{"pid":' : JSON.stringify(owner))
    const before = performance.now()
    await using lock = await FileLock.acquire(path, { pollMs: 5, silentMs: 200 })
    expect(performance.now() - before).toBeGreaterThan(195)
    expect(lock.isTakenFromSilence).toBe(true)
  })

  it('is not taken over while there are signs of life, whatever the clocks say', async () => {
    const path = await lockPath()
    await mkdir(join(path, '..'))
    await writeFile(path, JSON.stringify({ pid: 1, machine: 'elsewhere', id: 'x' }))
    let beat = 0
    const beating = setInterval(() => void utimes(path, ++beat, beat), 20)
    const waiting = FileLock.acquire(path, { pollMs: 5, silentMs: 500, signal: AbortSignal.timeout(1500) })
    await expectCode(() => waiting, 'ABORTED')
    clearInterval(beating)
  })

  it('gives signs of life', async () => {
    const path = await lockPath()
    await using _ = await FileLock.acquire(path, { silentMs: 60 })
    const waiting = FileLock.acquire(path, { pollMs: 5, silentMs: 600, signal: AbortSignal.timeout(1500) })
    await expectCode(() => waiting, 'ABORTED')
  })

  it('is taken over by one of many', async () => {
    const path = await lockPath()
    await mkdir(join(path, '..'))
    await writeFile(path, JSON.stringify({ pid: 1, machine: 'elsewhere', id: 'x' }))
    let holders = 0
    const work = async () => {
      await using _ = await FileLock.acquire(path, { pollMs: 1, silentMs: 100 })
      expect(++holders).toBe(1)
      await new Promise((resolve) => setTimeout(resolve, 20))
      holders--
    }
    await Promise.all(Array.from({ length: 5 }, work))
  })

  it('is not freed by an owner that has lost it', async () => {
    const path = await lockPath()
    const first = await FileLock.acquire(path)
    await writeFile(path, 'of another')
    await first.release()
    expect(await readFile(path, 'utf8')).toBe('of another')
  })

  it('names the folder that it cannot write to', async () => {
    const folder = await temporaryFolder()
    await writeFile(join(folder, 'locks'), '')
    await expectCode(() => FileLock.acquire(join(folder, 'locks', 'a.lock')), 'HUB_CACHE', 'locks')
  })
})

/** What a lock of this process says. */
async function ownText(path: string): Promise<Record<string, unknown>> {
  await using _ = await FileLock.acquire(`${path}.own`)
  return JSON.parse(await readFile(`${path}.own`, 'utf8'))
}
