import type { ChildProcess } from 'node:child_process'
import { createInterface } from 'node:readline'
import type { Readable, Writable } from 'node:stream'
import { MemorySampler } from '../memory-sampler.ts'
import type { RankCommand } from '../rank-command.ts'
import { runProcess } from './run-process.ts'

/** One process that ran a block. */
export interface Measurement {
  /** Of every run that counts. */
  readonly milliseconds: readonly number[]
  /** Largest anonymous memory from its start until it was warm. */
  readonly peakAnonBytes: number
}

/** @throws Error with what the process printed if it fails */
export async function measureBlock(command: RankCommand, signal: AbortSignal): Promise<Measurement> {
  const measured = await runProcess(command, signal, watch)
  if (measured !== undefined) return measured
  throw new Error('the process ended well without a report')
}

/** `undefined` if the process ends without a report. */
async function watch({ pid, stdin, stdio }: ChildProcess): Promise<Measurement | undefined> {
  // If it ends meanwhile, its exit code says more.
  stdin?.on('error', () => {})
  const sampler = new MemorySampler(pid === undefined ? [] : [pid])
  try {
    const lines = createInterface({ input: stdio[3] as Readable })[Symbol.asyncIterator]()
    if ((await lines.next()).value !== 'warm') return undefined
    const { ranks } = sampler.stop()
    ;(stdin as Writable).end('\n')
    const { value } = await lines.next()
    if (value === undefined) return undefined
    return { milliseconds: JSON.parse(value), peakAnonBytes: ranks[0]?.anonBytes ?? 0 }
  } finally {
    sampler.stop()
  }
}
