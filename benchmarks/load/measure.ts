import { type ChildProcess, fork } from 'node:child_process'
import { once } from 'node:events'
import { readFileSync } from 'node:fs'
import { fileURLToPath } from 'node:url'
import { rankEnvironment } from './rank-environment.ts'

/** What a rank says of its load. */
export interface RankReport {
  /** From the moment all ranks were ready to load until all had loaded. */
  readonly seconds: number
  readonly shardBytes: number
  readonly readBytes: number
}

/** Largest memory of one process while it loaded, from `/proc/PID/smaps_rollup`. */
interface PeakMemory {
  anonBytes: number
  pssBytes: number
}

/** One measured load, over all ranks. */
export interface LoadResult {
  readonly seconds: number
  /** Of the rank that needed most. */
  readonly peakAnonBytes: number
  /** Of the rank that needed most. */
  readonly peakPssBytes: number
  /** Largest sum over all ranks at one moment. */
  readonly totalPssBytes: number
  /** Of one rank. */
  readonly readBytes: number
  /** Of one rank. */
  readonly shardBytes: number
}

const SAMPLE_MS = 20

/**
 * Loads a checkpoint on `tp` ranks and watches their memory from outside, so that a busy rank is measured as well.
 *
 * @param worker - module that every rank runs, with `args`
 */
export async function measureLoad(worker: URL, args: readonly string[], tp: number): Promise<LoadResult> {
  const environments = await rankEnvironment(tp)
  const children = environments.map((env) =>
    fork(fileURLToPath(worker), args, {
      env: { ...process.env, ...env },
      execArgv: ['--import', 'tsx', '--conditions=@rankwise/source'],
    }),
  )
  const sampler = new MemorySampler(children)
  try {
    const reports = await Promise.all(children.map(reportOf))
    const peaks = sampler.stop()
    const [first] = reports as [RankReport]
    return {
      seconds: Math.max(...reports.map(({ seconds }) => seconds)),
      peakAnonBytes: Math.max(...peaks.ranks.map(({ anonBytes }) => anonBytes)),
      peakPssBytes: Math.max(...peaks.ranks.map(({ pssBytes }) => pssBytes)),
      totalPssBytes: peaks.totalPssBytes,
      readBytes: first.readBytes,
      shardBytes: first.shardBytes,
    }
  } finally {
    sampler.stop()
    for (const child of children) child.kill('SIGKILL')
  }
}

async function reportOf(child: ChildProcess): Promise<RankReport> {
  const failed = once(child, 'exit').then(([code, signal]) => {
    throw new Error(`a rank ended before it reported (${code ?? signal})`)
  })
  const [report] = (await Promise.race([once(child, 'message'), failed])) as [RankReport]
  failed.catch(() => {})
  return report
}

class MemorySampler {
  readonly #children: readonly ChildProcess[]
  readonly #ranks: readonly PeakMemory[]
  readonly #timer: NodeJS.Timeout
  #totalPssBytes = 0

  constructor(children: readonly ChildProcess[]) {
    this.#children = children
    this.#ranks = children.map(() => ({ anonBytes: 0, pssBytes: 0 }))
    this.#timer = setInterval(() => this.#sample(), SAMPLE_MS)
  }

  stop(): { readonly ranks: readonly PeakMemory[]; readonly totalPssBytes: number } {
    clearInterval(this.#timer)
    return { ranks: this.#ranks, totalPssBytes: this.#totalPssBytes }
  }

  #sample(): void {
    let total = 0
    for (const [i, child] of this.#children.entries()) {
      const now = memoryOf(child.pid as number)
      const peak = this.#ranks[i] as PeakMemory
      peak.anonBytes = Math.max(peak.anonBytes, now.anonBytes)
      peak.pssBytes = Math.max(peak.pssBytes, now.pssBytes)
      total += now.pssBytes
    }
    this.#totalPssBytes = Math.max(this.#totalPssBytes, total)
  }
}

/** Zeros for a process that is gone. */
function memoryOf(pid: number): PeakMemory {
  let text: string
  try {
    text = readFileSync(`/proc/${pid}/smaps_rollup`, 'utf8')
  } catch {
    return { anonBytes: 0, pssBytes: 0 }
  }
  const field = (name: string) => 1024 * Number(new RegExp(`^${name}: +(\\d+) kB`, 'm').exec(text)?.[1] ?? 0)
  return { anonBytes: field('Anonymous'), pssBytes: field('Pss') }
}
