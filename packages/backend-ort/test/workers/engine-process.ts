// What can only be seen of a whole process; argv[2] says which. Run by engine.test.ts, prints JSON.
import { readdirSync, readFileSync } from 'node:fs'
import { setTimeout as sleep } from 'node:timers/promises'
import { Worker } from 'node:worker_threads'
import { normal, opGraph, segmentOf } from '@rankwise/conformance'
import type { DeviceTensor, DType, Executable } from '@rankwise/core'
import { type EngineChoice, type OrtBackend, ort } from '../../src/index.ts'
import { placedBlock, sourceOf } from './placed-block.ts'

const [scenario, ...args] = process.argv.slice(2)

/** Anonymous memory of this process in pages of 4 KiB. */
function anonymousPages(): number {
  globalThis.gc?.()
  return Number(/^RssAnon:\s+(\d+) kB$/m.exec(readFileSync('/proc/self/status', 'utf8'))?.[1]) / 4
}

/** Nanoseconds that the thread of the event loop has computed. */
function loopNanoseconds(): number {
  return Number(readFileSync(`/proc/self/task/${process.pid}/schedstat`, 'utf8').split(' ', 1)[0])
}

interface Block {
  readonly backend: OrtBackend
  readonly executable: Executable
  readonly weights: readonly DeviceTensor[]
  run(): Promise<readonly DeviceTensor[]>
}

async function blockOn(engine: EngineChoice, tokens: number, threads = 1, dtype?: DType): Promise<Block> {
  const { segment, inputs, weights: values } = placedBlock(tokens, dtype)
  const backend = await ort({ device: 'cpu', engine, threads })
  const weights = await Promise.all(values.map((value) => backend.loadShard(sourceOf(value), { dtype: 'float32' })))
  const executable = await backend.compile(segment, weights)
  const run = async () => {
    const given = inputs.map((input) => backend.upload(input))
    const results = await executable.run(given, weights)
    for (const tensor of given) tensor.dispose()
    return results
  }
  return { backend, executable, weights, run }
}

/** Elements of what a block gives. */
async function valuesOf({ backend, run }: Block): Promise<readonly number[]> {
  const [result] = (await run()) as [DeviceTensor]
  return Array.from((await backend.download(result)).data, Number)
}

const SCENARIOS: Readonly<Record<string, () => Promise<unknown>>> = {
  /** How results differ between engines, one after the other in the order of `args`, and between 1 and 2 threads. */
  async both() {
    const worst: Record<string, number> = {}
    for (const dtype of ['float32', 'bfloat16'] as const) {
      const results: (readonly number[])[] = []
      for (const threads of [1, 2]) {
        for (const engine of args) {
          const block = await blockOn(engine as EngineChoice, 77, threads, dtype)
          results.push(await valuesOf(block))
          await block.backend.dispose()
        }
      }
      worst[dtype] = Math.max(...results.map((values) => relativeRms(values, results[0] as readonly number[])))
    }
    return worst
  },

  /** Pages that 50 steps add after 20, what a larger block takes and what of that is kept; and memory after all is disposed of. */
  async steps() {
    const block = await blockOn('capi', 256)
    const step = async () => {
      for (const tensor of await block.run()) tensor.dispose()
    }
    for (let i = 0; i < 20; i++) await step()
    const before = anonymousPages()
    for (let i = 0; i < 50; i++) await step()
    const growth = anonymousPages() - before
    for (const weight of block.weights) weight.dispose()
    await block.executable.dispose()
    const after = block.backend.memory()
    await block.backend.dispose()
    const small = anonymousPages()
    const large = await blockOn('capi', 1024)
    for (const tensor of await large.run()) tensor.dispose()
    const taken = anonymousPages() - small
    await large.backend.dispose()
    return { growth, after, taken, kept: anonymousPages() - small }
  },

  /** What the event loop does while steps are computed. */
  async loop() {
    const block = await blockOn('capi', 1024)
    await block.run()
    let ticks = 0
    const timer = setInterval(() => ticks++, 1)
    const [started, computed] = [performance.now(), loopNanoseconds()]
    let steps = 0
    while (performance.now() - started < 500) {
      for (const tensor of await block.run()) tensor.dispose()
      steps++
    }
    const [milliseconds, busy] = [performance.now() - started, (loopNanoseconds() - computed) / 1e6]
    clearInterval(timer)
    await block.backend.dispose()
    return { busyPerStep: busy / steps, millisecondsPerStep: milliseconds / steps, ticks }
  },

  /** Ends while a segment is computed. */
  async exit() {
    const block = await blockOn('capi', 1024)
    void block.run()
    await sleep(5)
    process.stdout.write('"running"')
    process.exit(0)
  },

  /** The same block in several threads of JavaScript. */
  async workers() {
    const values = await valuesOf(await blockOn('capi', 77))
    // Node 20 gives a worker no TypeScript of its own.
    const source = `import('tsx/esm/api').then(({ register }) => (register(), import(${JSON.stringify(import.meta.url)})))`
    const options = {
      eval: true,
      argv: ['worker'],
      execArgv: process.execArgv.filter((flag) => flag !== '--expose-gc'),
    }
    const others = await Promise.all(
      [0, 1].map(async () => {
        const worker = new Worker(source, options)
        return new Promise<readonly number[]>((resolve, reject) => worker.on('message', resolve).on('error', reject))
      }),
    )
    const stopped = new Worker(source, { ...options, argv: ['busy'] })
    await new Promise((resolve) => stopped.once('message', resolve))
    await stopped.terminate()
    return { distances: others.map((other) => relativeRms(other, values)), again: values.length }
  },

  /** Processors that the threads of this process may use, once each. */
  async pinned() {
    const backend = await ort({ device: 'cpu', engine: 'capi', threads: Number(args[0]), pinThreads: true })
    await backend.compile(segmentOf(opGraph('silu', [normal([2], 0)], {})))
    const lists = readdirSync('/proc/self/task').map((task) => {
      const status = readFileSync(`/proc/self/task/${task}/status`, 'utf8')
      return /^Cpus_allowed_list:\s*(\S+)$/m.exec(status)?.[1]
    })
    await backend.dispose()
    return [...new Set(lists)].sort()
  },
}

/** Relative RMS of the differences. */
function relativeRms(values: readonly number[], expected: readonly number[]): number {
  const squares = (numbers: readonly number[]) => numbers.reduce((sum, value) => sum + value * value, 0)
  return Math.sqrt(squares(values.map((value, i) => value - (expected[i] as number))) / squares(expected))
}

if (scenario === 'worker' || scenario === 'busy') {
  const { parentPort } = await import('node:worker_threads')
  const block = await blockOn('capi', scenario === 'busy' ? 1024 : 77)
  if (scenario === 'worker') parentPort?.postMessage(await valuesOf(block))
  else {
    void block.run()
    parentPort?.postMessage('running')
  }
} else process.stdout.write(JSON.stringify(await SCENARIOS[scenario as string]?.()))
