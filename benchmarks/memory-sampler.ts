import { readFileSync } from 'node:fs'

/** Largest memory of one process, in bytes. */
export interface PeakMemory {
  anonBytes: number
  pssBytes: number
}

const SAMPLE_MS = 20

/** Watches processes from outside, through `/proc/PID/smaps_rollup`, so that a busy one is measured as well. */
export class MemorySampler {
  readonly #pids: readonly number[]
  readonly #ranks: readonly PeakMemory[]
  readonly #timer: NodeJS.Timeout
  #totalPssBytes = 0

  constructor(pids: readonly number[]) {
    this.#pids = pids
    this.#ranks = pids.map(() => ({ anonBytes: 0, pssBytes: 0 }))
    this.#timer = setInterval(() => this.#sample(), SAMPLE_MS)
  }

  /** The peaks until now; a second call changes nothing. */
  stop(): { readonly ranks: readonly PeakMemory[]; readonly totalPssBytes: number } {
    clearInterval(this.#timer)
    return { ranks: this.#ranks, totalPssBytes: this.#totalPssBytes }
  }

  #sample(): void {
    let total = 0
    for (const [i, pid] of this.#pids.entries()) {
      const now = memoryOf(pid)
      const peak = this.#ranks[i] as PeakMemory
      peak.anonBytes = Math.max(peak.anonBytes, now.anonBytes)
      peak.pssBytes = Math.max(peak.pssBytes, now.pssBytes)
      total += now.pssBytes
    }
    this.#totalPssBytes = Math.max(this.#totalPssBytes, total)
  }
}

/** Zeros for a process that is gone. */
export function memoryOf(pid: number | 'self'): PeakMemory {
  let text: string
  try {
    text = readFileSync(`/proc/${pid}/smaps_rollup`, 'utf8')
  } catch {
    return { anonBytes: 0, pssBytes: 0 }
  }
  const field = (name: string) => 1024 * Number(new RegExp(`^${name}: +(\\d+) kB`, 'm').exec(text)?.[1] ?? 0)
  return { anonBytes: field('Anonymous'), pssBytes: field('Pss') }
}
