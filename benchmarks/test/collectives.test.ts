import { spawnSync } from 'node:child_process'
import { mkdtemp, readdir, readFile, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import type { Engine, EngineName, Found } from '../collectives/engine.ts'
import { findGloo } from '../collectives/gloo.ts'
import { measure } from '../collectives/measure.ts'
import { findOpenMpi } from '../collectives/openmpi.ts'
import { fill, requireSums } from '../collectives/pattern.ts'
import { planOf, SIZES } from '../collectives/plan.ts'
import { findLocal } from '../collectives/rankwise.ts'
import { formatRatios, rowOf } from '../collectives/row.ts'
import { runRanks } from '../collectives/run-ranks.ts'

const source = (file: string) => fileURLToPath(new URL(`../collectives/${file}`, import.meta.url))
const never = new AbortController().signal

let folder: string
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), 'rankwise-bench-'))
})
afterAll(() => rm(folder, { recursive: true }))

describe('rows', () => {
  const row = (engine: EngineName, microseconds: number, bytes = 1024) =>
    rowOf({ engine, ranks: 2, bytes }, [microseconds, microseconds, 5])

  it('take the median of the batches and keep the fastest and the slowest', () => {
    expect(rowOf({ engine: 'gloo', ranks: 2, bytes: 4 }, [30, 10, 20])).toEqual({
      engine: 'gloo',
      ranks: 2,
      bytes: 4,
      microseconds: 20,
      minMicroseconds: 10,
      maxMicroseconds: 30,
    })
  })

  it('are compared with those of the same size, with a blank where there is none', () => {
    const rows = [
      row('rankwise local', 10),
      row('gloo', 55),
      row('rankwise local', 100, 2 ** 23),
      row('gloo', 1000, 2 ** 23),
      row('openmpi chunked', 150, 2 ** 23),
    ]
    expect(formatRatios(rows).map((line) => line.replaceAll(/ {2,}/g, ' | '))).toEqual([
      '',
      '2 ranks | 1 KiB | 8 MiB',
      'gloo / rankwise local | 5.50x | 10.0x',
      ' | fastest batches | 1.00x | 1.00x',
      'openmpi chunked / rankwise local | 1.50x',
      ' | fastest batches | 1.00x',
    ])
  })
})

describe('sums', () => {
  const ranks = 4

  it.each(SIZES)('stay finite and exact in float32 over a batch of %i bytes', (bytes) => {
    const { operations, batches, warmUps } = planOf(bytes)
    const data = Float32Array.from({ length: 300 }, () => 0)
    const own = new Float32Array(data.length)
    for (let rank = 0; rank < ranks; rank++) {
      fill(own, rank)
      for (const [i, value] of own.entries()) data[i] = (data[i] as number) + value
    }
    for (let i = 1; i < operations; i++) for (const [j, value] of data.entries()) data[j] = value * ranks
    expect(data.every(Number.isFinite)).toBe(true)
    expect(() => requireSums(data, ranks, operations)).not.toThrow()
    expect(batches).toBeGreaterThan(warmUps)
  })

  it.each([
    ['one rank is missing', (data: Float32Array) => fill(data, 0)],
    ['the last element is wrong', (data: Float32Array) => data.fill(0, data.length - 1)],
    ['a block landed elsewhere', (data: Float32Array) => data.copyWithin(0, 64, 128)],
  ])('are refused when %s', (_, spoil) => {
    const data = new Float32Array(1000)
    fill(data, 0)
    requireSums(data, 1, 1)
    const sums = data.map((value, i) => value + (i % 251) * 2 + 1)
    requireSums(sums, 2, 1)
    spoil(sums)
    expect(() => requireSums(sums, 2, 1)).toThrow('wrong sum: element')
  })
})

describe('processes', () => {
  const node = (script: string) => ({ file: process.execPath, args: ['-e', script] })

  it('give what the first one printed', async () => {
    expect(await runRanks([node('console.log(1)'), node('console.log(2)')], never)).toBe('1\n')
  })

  it('are stopped when one fails, and say how each ended', async () => {
    const failing = node('console.error("no such rank"); process.exitCode = 3')
    const waiting = node('setInterval(() => {}, 1000)')
    await expect(runRanks([waiting, failing], never)).rejects.toThrow(
      /^0: node ended with SIGTERM\n[\s\S]*1: node ended with 3\nno such rank/,
    )
  })

  it('are stopped when the user stops', async () => {
    await expect(runRanks([node('setInterval(() => {}, 1000)')], AbortSignal.timeout(200))).rejects.toThrow(
      'The operation was aborted due to timeout',
    )
  })

  it('that do not exist are named', async () => {
    await expect(runRanks([{ file: '/nonexistent/mpirun', args: [] }], never)).rejects.toThrow(
      /0: .*\/nonexistent\/mpirun ENOENT/,
    )
  })
})

describe('engines', () => {
  const plans = [
    { bytes: 4, operations: 50, batches: 3, warmUps: 1 },
    { bytes: 5 * 2 ** 20, operations: 2, batches: 2, warmUps: 1 },
  ]
  const enginesOf = (found: Found): readonly Engine[] => {
    if ('missing' in found) throw new Error(found.missing)
    return found.engines
  }
  const expectTimes = async (found: Found) => {
    for (const engine of enginesOf(found)) {
      const times = await measure(engine, 2, plans, never)
      expect([...times.keys()], engine.name).toEqual(plans.map(({ bytes }) => bytes))
      for (const { bytes, batches, warmUps } of plans) {
        expect(times.get(bytes), engine.name).toHaveLength(batches - warmUps)
        expect(Math.min(...(times.get(bytes) ?? [])), engine.name).toBeGreaterThan(0)
      }
    }
  }
  /** The program of an engine, with another operation in place of the sum. */
  const mutant = async (file: string, sum: string, other: string) => {
    const text = await readFile(source(file), 'utf8')
    expect(text).toContain(sum)
    const path = join(folder, file)
    await writeFile(path, text.replaceAll(sum, other))
    return path
  }
  const expectWrongSum = async (found: Found) => {
    const [engine] = enginesOf(found)
    await expect(measure(engine as Engine, 2, plans, never)).rejects.toThrow(/failed on 2 ranks:[\s\S]*wrong sum/)
  }

  it('rankwise local reduces and reports', async () => expectTimes(await findLocal()))

  it('must report every batch', async () => {
    const engine: Engine = {
      name: 'gloo',
      commands: async () => [{ file: process.execPath, args: ['-e', 'console.log(`{"bytes":4,"microseconds":[1]}`)'] }],
    }
    await expect(measure(engine, 2, plans, never)).rejects.toThrow('gloo did not report 3 batches of 4 bytes')
  })

  const gloo = findGloo('python3')
  // Two processes import torch, which takes long on busy cores.
  describe.skipIf('missing' in gloo)('gloo (needs python3 with torch)', { timeout: 120_000 }, () => {
    it('reduces and reports', async () => expectTimes(gloo))

    it('is refused when it sums wrongly', async () =>
      expectWrongSum(findGloo('python3', await mutant('gloo-rank.py', 'ReduceOp.SUM', 'ReduceOp.MIN'))))
  })

  const hasOpenMpi = ['mpicc', 'mpirun'].every((name) => spawnSync(name, ['--version']).status === 0)
  describe.skipIf(!hasOpenMpi)('Open MPI (needs mpicc and mpirun)', () => {
    it('reduces and reports', async () => expectTimes(findOpenMpi(folder)))

    it('is refused when it sums wrongly', async () =>
      expectWrongSum(findOpenMpi(folder, await mutant('openmpi.c', 'MPI_SUM', 'MPI_MIN'))))
  })
})

describe('bench:collectives', () => {
  const run = (args: readonly string[], env: NodeJS.ProcessEnv = {}) =>
    spawnSync(process.execPath, ['--import', 'tsx', '--conditions=@rankwise/source', source('main.ts'), ...args], {
      encoding: 'utf8',
      env: { ...process.env, ...env },
    })

  it('writes rows, says what it skips and leaves nothing behind', async () => {
    const json = join(folder, 'rows.json')
    const args = ['--ranks', '2', '--bytes', '4', '--repeat', '1', '--json', json]
    const temporary = await mkdtemp(join(folder, 'temporary-'))
    const { status, stdout, stderr } = run(args, { PATH: '/nonexistent', TMPDIR: temporary })
    expect(stderr).toMatch(/^round 1 of 1 on 2 ranks: rankwise local\n/)
    expect(status).toBe(0)
    expect(stdout).toMatch(/^gloo: skipped, python3 does not start/m)
    expect(stdout).toMatch(/^openmpi: skipped, mpirun does not start/m)
    const rows = JSON.parse(await readFile(json, 'utf8'))
    for (const engine of ['rankwise local', 'rankwise tcp']) {
      expect(rows).toContainEqual({
        engine,
        ranks: 2,
        bytes: 4,
        microseconds: expect.any(Number),
        minMicroseconds: expect.any(Number),
        maxMicroseconds: expect.any(Number),
      })
    }
    expect((await readdir(temporary)).filter((name) => name.startsWith('rankwise'))).toEqual([])
    // Three engines of two ranks start one after the other.
  }, 60_000)

  it('ends with 2 if the named Python has no torch', () => {
    const { status, stderr } = run(['--python', 'false'])
    expect(stderr).toMatch(/--python: false has no torch.distributed with gloo/)
    expect(status).toBe(2)
  })

  it.each([
    ['--ranks', '3'],
    ['--bytes', '6'],
    ['--repeat', '0'],
  ])('refuses %s %s', (option, value) => {
    const { status, stderr } = run([option, value])
    expect(stderr).toContain(option)
    expect(status).toBe(1)
  })
})
