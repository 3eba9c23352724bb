import { spawnSync } from 'node:child_process'
import { mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { describe, expect, it } from 'vitest'
import { compileBench } from '../gemm/bench.ts'
import { formatRow } from '../gemm/row.ts'

const NO_COMPILER = spawnSync(process.env.CC ?? 'cc', ['--version']).status !== 0
if (NO_COMPILER) process.stderr.write('SKIPPED: test of bench:gemm: no C compiler (set CC)\n')

describe('bench:gemm', () => {
  it.skipIf(NO_COMPILER)('times every kernel, checks what it computes, and reads the weights', async () => {
    const folder = await mkdtemp(join(tmpdir(), 'rankwise-gemm-'))
    try {
      const bench = await compileBench(folder)
      const times = bench(3, 40, 70, 2, 3)
      expect(times.map(({ kernel }) => kernel).slice(-2)).toEqual(['baseline', 'read'])
      for (const { milliseconds, minMilliseconds, maxMilliseconds } of times) {
        expect(minMilliseconds).toBeGreaterThan(0)
        expect(milliseconds).toBeGreaterThanOrEqual(minMilliseconds)
        expect(maxMilliseconds).toBeGreaterThanOrEqual(milliseconds)
      }
    } finally {
      await rm(folder, { recursive: true })
    }
  })

  it('gives rates of the median, of a core, and of the weights', () => {
    const times = { milliseconds: 20, minMilliseconds: 10, maxMilliseconds: 30, minCpuMilliseconds: 10 }
    const line = formatRow({ m: 100, n: 1000, k: 10000, threads: 2, kernel: 'avx2', ...times })
    expect(line.replaceAll(/ {2,}/g, ' | ')).toBe(
      '100 x 1000 x 10000 | 2 threads | avx2 | 100.0 GFLOP/s (200.0 per core) | 20.00 ms (10.00–30.00) | 1.0 GB/s',
    )
  })
})
