import { execFileSync } from 'node:child_process'
import { mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import type { StepDType } from './job.ts'

/** What one core reaches in a loop of multiply-adds, in GFLOP/s; of bfloat16, 0 where the CPU has no such instruction. */
export type Peak = Readonly<Record<StepDType, number>>

const CC = process.env.CC || 'cc'
const SOURCE = fileURLToPath(new URL('peak.c', import.meta.url))

/** Measures this machine; undefined without a C compiler. */
export function measurePeak(): Peak | undefined {
  const folder = mkdtempSync(join(tmpdir(), 'rankwise-peak-'))
  try {
    const program = join(folder, 'peak')
    execFileSync(CC, ['-O2', '-march=native', SOURCE, '-o', program], { stdio: ['ignore', 'ignore', 'inherit'] })
    return JSON.parse(execFileSync(program, { encoding: 'utf8' })) as Peak
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === 'ENOENT') return undefined
    throw error
  } finally {
    rmSync(folder, { recursive: true })
  }
}
