import { type ChildProcess, spawn } from 'node:child_process'
import { once } from 'node:events'
import type { Readable } from 'node:stream'
import { text } from 'node:stream/consumers'
import { setTimeout as sleep } from 'node:timers/promises'
import { MemorySampler } from '../memory-sampler.ts'
import type { RankCommand } from '../rank-command.ts'
import { rankEnvironment } from '../rank-environment.ts'

/** What a rank says of its load: one line of JSON on descriptor 3, after which it waits for the end of its input. */
export interface RankReport {
  /** From the moment all ranks were ready to load until all had loaded. */
  readonly seconds: number
  readonly shardBytes: number
  /** Bytes of the file that the loader read or mapped; null where the engine does not count them. */
  readonly readBytes: number | null
  /** Bytes that storage had to deliver for this rank during the load: `read_bytes` of `/proc/PID/io`. */
  readonly storageBytes: number
  /** Anonymous memory of the rank when it was ready to load: what its runtime takes. */
  readonly startAnonBytes: number
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
  /** Of the rank that needed most, before the load. */
  readonly startAnonBytes: number
  /** Of one rank. */
  readonly readBytes: number | null
  /** Of one rank. */
  readonly shardBytes: number
  /** Of all ranks: a page that one rank fetches is there for the others. */
  readonly storageBytes: number
}

const SHUTDOWN_MS = 10_000

/** Loads a checkpoint on `tp` ranks and watches their memory from outside. No rank is left when it returns. */
export async function measureLoad({ file, args, env }: RankCommand, tp: number): Promise<LoadResult> {
  const environments = await rankEnvironment(tp)
  const ranks = environments.map((variables) =>
    spawn(file, args, { env: { ...process.env, ...env, ...variables }, stdio: ['pipe', 'pipe', 'pipe', 'pipe'] }),
  )
  const exits = ranks.map((rank) => once(rank, 'exit'))
  const sampler = new MemorySampler(ranks.map(({ pid }) => pid as number))
  try {
    const reports = await Promise.all(ranks.map(reportOf))
    const peaks = sampler.stop()
    for (const rank of ranks) rank.stdin?.end()
    await Promise.race([Promise.all(exits), sleep(SHUTDOWN_MS, undefined, { ref: false })])
    return resultOf(reports, peaks)
  } finally {
    sampler.stop()
    for (const rank of ranks) rank.kill('SIGKILL')
    await Promise.all(exits)
  }
}

function resultOf(reports: readonly RankReport[], peaks: ReturnType<MemorySampler['stop']>): LoadResult {
  const [first] = reports as [RankReport]
  return {
    seconds: Math.max(...reports.map(({ seconds }) => seconds)),
    peakAnonBytes: Math.max(...peaks.ranks.map(({ anonBytes }) => anonBytes)),
    peakPssBytes: Math.max(...peaks.ranks.map(({ pssBytes }) => pssBytes)),
    totalPssBytes: peaks.totalPssBytes,
    startAnonBytes: Math.max(...reports.map(({ startAnonBytes }) => startAnonBytes)),
    readBytes: first.readBytes,
    shardBytes: first.shardBytes,
    storageBytes: reports.reduce((sum, { storageBytes }) => sum + storageBytes, 0),
  }
}

/** What the rank prints is shown only if it fails: diffusers warns about every load. */
async function reportOf(rank: ChildProcess, index: number): Promise<RankReport> {
  const [stdout, stderr, channel] = rank.stdio.slice(1) as [Readable, Readable, Readable]
  const output = Promise.all([text(stdout), text(stderr)])
  const line = await firstLine(channel)
  if (line !== undefined) return JSON.parse(line)
  throw new Error(`rank ${index} ended before it reported:\n${(await output).join('')}`)
}

async function firstLine(channel: Readable): Promise<string | undefined> {
  let received = ''
  for await (const chunk of channel.setEncoding('utf8')) {
    received += chunk
    const end = received.indexOf('\n')
    if (end >= 0) return received.slice(0, end)
  }
  return undefined
}
