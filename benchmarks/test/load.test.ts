import { spawnSync } from 'node:child_process'
import { existsSync } from 'node:fs'
import { mkdtemp, readFile, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { type LoadResult, measureLoad } from '../load/measure.ts'
import { cachedShare, setPageCache } from '../load/page-cache.ts'
import { formatRatios, rowOf } from '../load/row.ts'

const main = fileURLToPath(new URL('../load/main.ts', import.meta.url))

let folder: string
beforeAll(async () => {
  // Beside the sources: the folder of temporary files may be in memory, where nothing can be dropped from the cache.
  folder = await mkdtemp(fileURLToPath(new URL('.tmp-', import.meta.url)))
})
afterAll(() => rm(folder, { recursive: true }))

function result(seconds: number, bytes: number): LoadResult & { readonly restSeconds: number } {
  return {
    seconds,
    restSeconds: seconds,
    peakAnonBytes: bytes,
    peakPssBytes: 2 * bytes,
    totalPssBytes: 3 * bytes,
    startAnonBytes: bytes / 2,
    storageBytes: bytes,
    readBytes: null,
    shardBytes: 7,
  }
}

describe('rows', () => {
  const sharded = { tp: 2, mode: 'sharded', cache: 'warm', engine: 'rankwise' } as const

  it('take the time of the median load and the memory of the worst', () => {
    expect(rowOf(sharded, [result(3, 20), result(1, 10), result(2, 30)])).toMatchObject({
      ...sharded,
      seconds: 2,
      minSeconds: 1,
      maxSeconds: 3,
      peakAnonBytes: 30,
      peakPssBytes: 60,
      totalPssBytes: 90,
      storageBytes: 30,
      readBytes: null,
    })
  })

  it('are compared with the same way of loading', () => {
    const rows = [
      rowOf(sharded, [result(1, 10)]),
      rowOf({ ...sharded, cache: 'cold' }, [result(100, 1000)]),
      rowOf({ ...sharded, mode: 'full' }, [result(4, 50)]),
      rowOf({ ...sharded, engine: 'diffusers' }, [result(2, 30)]),
    ]
    const lines = formatRatios(rows).map((line) => line.replaceAll(/ +/g, ' '))
    expect(lines).toEqual([
      'tp 2 full warm rankwise full / sharded seconds 4.00x with the rest 4.00x anonymous 5.00x pss 5.00x pss of all ranks 5.00x',
      'tp 2 sharded warm diffusers / rankwise seconds 2.00x with the rest 2.00x anonymous 3.00x pss 3.00x pss of all ranks 3.00x',
    ])
  })
})

describe.skipIf(spawnSync('fincore', ['--version']).status !== 0)(
  'the page cache (needs fincore of util-linux)',
  () => {
    it('is filled and dropped as the kernel sees it', async () => {
      const file = join(folder, 'weights')
      await writeFile(file, Buffer.alloc(8 << 20, 1), { flush: true })
      await setPageCache(file, 'warm')
      expect(cachedShare(file)).toBe(1)
      await setPageCache(file, 'cold')
      expect(cachedShare(file)).toBeLessThanOrEqual(0.01)
    })

    it.skipIf(!existsSync('/dev/shm'))('is not said to be cold where pages cannot be dropped', async () => {
      const file = `/dev/shm/rankwise-load-test-${process.pid}`
      await writeFile(file, Buffer.alloc(1 << 20, 1))
      try {
        await expect(setPageCache(file, 'cold')).rejects.toThrow(
          /is not cold: it holds 100.0 % .* --directory on a disk/,
        )
      } finally {
        await rm(file)
      }
    })
  },
)

describe('a measured load', () => {
  const HELD_BYTES = 200e6
  const rank = (script: string) => ({ file: process.execPath, args: ['-e', script] })
  const report = `{ seconds: 1 + Number(process.env.RANK), shardBytes: 5, readBytes: 6, storageBytes: 7, startAnonBytes: 8 }`
  const reporting = `require('fs').writeSync(3, JSON.stringify(${report}) + '\\n'); process.stdin.resume()`

  it('is as slow as the slowest rank, and its memory is seen from outside', async () => {
    const hold = `if (process.env.RANK === '1') global.held = Buffer.alloc(${HELD_BYTES}, 1)`
    const measured = await measureLoad(rank(`${hold}; setTimeout(() => { ${reporting} }, 200)`), 2)
    expect(measured).toMatchObject({ seconds: 2, shardBytes: 5, readBytes: 6, storageBytes: 14, startAnonBytes: 8 })
    expect(measured.peakAnonBytes).toBeGreaterThan(HELD_BYTES)
    expect(measured.totalPssBytes).toBeGreaterThan(measured.peakPssBytes)
  })

  it('that fails on one rank says what that rank printed and leaves no rank behind', async () => {
    const pidFile = join(folder, 'pid')
    const script = `
      const { existsSync, renameSync, writeFileSync } = require('fs')
      const pidFile = ${JSON.stringify(pidFile)}
      if (process.env.RANK === '1') {
        writeFileSync(pidFile + '.new', String(process.pid))
        renameSync(pidFile + '.new', pidFile)
      }
      setInterval(() => {
        if (process.env.RANK === '0' && existsSync(pidFile)) throw new Error('no such weight')
      }, 10)`
    await expect(measureLoad(rank(script), 2)).rejects.toThrow(/rank 0 ended before it reported:[\s\S]*no such weight/)
    const survivor = Number(await readFile(pidFile, 'utf8'))
    expect(() => process.kill(survivor, 0)).toThrow('ESRCH')
  })
})

describe('bench:load', () => {
  const run = (...args: string[]) =>
    spawnSync(process.execPath, ['--import', 'tsx', '--conditions=@rankwise/source', main, ...args], {
      encoding: 'utf8',
    })

  it.each([
    ['is missing', '/nonexistent/python', /--peer: \/nonexistent\/python does not start/],
    ['has no diffusers', 'false', /--peer: false has no diffusers with tensor parallelism/],
  ])('ends with 2 before it makes a checkpoint if the Python %s', (_, python, message) => {
    const directory = join(tmpdir(), `rankwise-no-checkpoint-${process.pid}`)
    const { status, stderr } = run('--python', python, '--directory', directory)
    expect(stderr).toMatch(message)
    expect(status).toBe(2)
    expect(existsSync(directory)).toBe(false)
  })

  it.each([
    ['--repeat', '0'],
    ['--tp', '1,two'],
    ['--layers', '25'],
  ])('refuses %s %s', (option, value) => {
    const { status, stderr } = run(option, value)
    expect(stderr).toContain(option)
    expect(status).toBe(1)
  })
})
