import { readFileSync } from 'node:fs'
import { Worker } from 'node:worker_threads'

const SAMPLE_MS = 20

/**
 * Runs in a thread of its own: a backend may hold the event loop for as long as an operation takes, which is when memory
 * is at its peak. As text, so that it needs no file beside the bundle.
 */
const SAMPLER = `
const { readFileSync } = require('node:fs')
const { workerData } = require('node:worker_threads')
const peak = new Float64Array(workerData.buffer)
setInterval(() => {
  const kilobytes = /^RssAnon:\\s+(\\d+) kB/m.exec(readFileSync('/proc/self/status', 'latin1'))[1]
  peak[0] = Math.max(peak[0], 1024 * Number(kilobytes))
}, ${SAMPLE_MS})
`

/** Watches the anonymous memory of this process: what it takes for itself, without the files that it maps. */
export class AnonymousMemory implements Disposable {
  readonly #peak = new Float64Array(new SharedArrayBuffer(Float64Array.BYTES_PER_ELEMENT))
  readonly #worker: Worker | undefined

  constructor() {
    if (!isCounted()) return
    this.#worker = new Worker(SAMPLER, { eval: true, execArgv: [], workerData: this.#peak })
    this.#worker.unref()
  }

  /** Most bytes until now; undefined where the system does not count them. */
  get peakBytes(): number | undefined {
    return this.#worker === undefined ? undefined : this.#peak[0]
  }

  [Symbol.dispose](): void {
    void this.#worker?.terminate()
  }
}

/** Whether the system says how much of a process's memory is anonymous, as Linux does from 4.5. */
function isCounted(): boolean {
  try {
    return readFileSync('/proc/self/status', 'latin1').includes('RssAnon:')
  } catch {
    return false
  }
}
