import { type ChildProcess, spawn } from 'node:child_process'
import type { Socket } from 'node:net'
import { fileURLToPath } from 'node:url'
import { loadNative, type Native, SharedMemory } from '@rankwise/collectives-local/internals'
import { RankwiseError, type RankwiseErrorDetails } from '@rankwise/core'
import { MAILBOX_BYTES, Mailbox, type Order, type Region, STATE } from './mailbox.ts'

/** How MPI is started. */
export interface MpiProcessOptions {
  /** Bytes of memory for data. */
  readonly dataBytes: number
  /** Environment of the process. */
  readonly env: Readonly<Record<string, string>>
  /** Called when the process ends or fails on its own. */
  readonly onFailure: (error: RankwiseError) => void
  /** Throws when the group has ended, which ends every wait. */
  readonly requireRunning: () => void
}

/** What the process says of the library. */
interface Welcome {
  readonly family: string
  readonly version: string
}

/** File descriptor of the process that leads to the PMI server. */
export const PMI_DESCRIPTOR = 3

/** How long a rank polls before it sleeps; waking up takes 0.11 to 0.15 ms. */
const SPIN_MS = 0.1
/** All ranks have left when MPI_Finalize is called; only a rank that dies in just that moment holds it up. */
const FINALIZE_MS = 10_000

/**
 * MPI in a process of its own. An MPI library ends or blocks the process that it runs in when another one is lost, takes
 * over signals and malloc, and can be started once; the rank survives all of that, and can end it at any time. Data
 * pass through memory that both processes map.
 */
export class MpiProcess {
  /** Leads to the library's PMI client. */
  readonly pmi: Socket
  readonly #native: Native
  readonly #memory: SharedMemory
  readonly #mailbox: Mailbox
  readonly #child: ChildProcess
  readonly #requireRunning: () => void
  readonly #exited: Promise<void>
  #used = MAILBOX_BYTES
  #ended = false

  private constructor(native: Native, memory: SharedMemory, child: ChildProcess, options: MpiProcessOptions) {
    this.#native = native
    this.#memory = memory
    this.#mailbox = new Mailbox(memory.bytes, memory.address, (address) => native.wake(address))
    this.#child = child
    this.#requireRunning = options.requireRunning
    this.pmi = child.stdio[PMI_DESCRIPTOR] as Socket
    this.pmi.unref()
    child.unref()
    this.#exited = new Promise((resolve) => {
      const onEnd = (how: string) => {
        if (!this.#ended) options.onFailure(this.#failure(how))
        resolve()
      }
      child.once('exit', (code, signal) => onEnd(signal === null ? `exit code ${code}` : `signal ${signal}`))
      child.once('error', (error) => onEnd(error.message))
    })
  }

  /** Starts the process; {@link ready} tells when MPI is there. @throws RankwiseError `SHARED_MEMORY` */
  static async start(options: MpiProcessOptions): Promise<MpiProcess> {
    const native = await loadNative()
    const memory = SharedMemory.create(native, MAILBOX_BYTES + options.dataBytes)
    try {
      const where = [process.pid, process.pid, memory.descriptor, memory.bytes.byteLength].map(String)
      const child = spawn(process.execPath, [...programArguments(), PROGRAM, ...where], {
        env: { ...process.env, ...options.env },
        // What the library prints belongs to no output of the rank.
        stdio: ['ignore', 2, 2, 'pipe'],
      })
      return new MpiProcess(native, memory, child, options)
    } catch (error) {
      memory.unmap()
      throw error
    }
  }

  /**
   * Resolves when all processes that MPI knows have come.
   *
   * @throws RankwiseError `MPI_NOT_FOUND`, `MPI_UNSUPPORTED`, `MPI_FAILED`
   */
  async ready(): Promise<Welcome & { readonly rank: number; readonly size: number }> {
    await this.#until(() => this.#mailbox.state !== STATE.starting)
    this.#memory.closeDescriptor()
    if (this.#mailbox.state !== STATE.ready) throw this.#failure('a failure')
    return { ...(JSON.parse(this.#mailbox.text) as Welcome), ...this.#mailbox.world }
  }

  /** Takes `bytes` bytes of the memory for good. */
  region(bytes: number): Region {
    const start = this.#used
    this.#used += Math.ceil(bytes / PAGE) * PAGE
    return { bytes: this.#memory.bytes.subarray(start, start + bytes), start }
  }

  /**
   * Starts transfers at once and resolves when all are done. Orders that are pending at the same time have different
   * tags: those with one tag meet in the order in which they are given.
   */
  async run(order: Order): Promise<void> {
    this.#requireRunning()
    const transfers = order.transfers.filter(({ bytes }) => bytes > 0)
    if (transfers.length === 0) return
    const slot = this.#mailbox.order({ ...order, transfers })
    await this.#until(() => this.#mailbox.takeDone(slot))
  }

  /** @throws Error when the group has ended: its memory may be gone */
  requireRunning(): void {
    this.#requireRunning()
  }

  /** Ends MPI together with all others. */
  async finalize(): Promise<void> {
    const end = performance.now() + FINALIZE_MS
    this.#ended = true
    this.#mailbox.finalize()
    while (this.#mailbox.state === STATE.finalizing && performance.now() < end) {
      await this.#native.sleep(this.#mailbox.newsAddress, this.#mailbox.newsTicket)
    }
  }

  /** Ends the process at once, whatever MPI does, and frees the memory. */
  async kill(): Promise<void> {
    this.#ended = true
    this.#child.ref()
    this.#child.kill('SIGKILL')
    await this.#exited
    this.pmi.destroy()
    this.#memory.unmap()
  }

  async #until(condition: () => boolean): Promise<void> {
    for (let end = performance.now() + SPIN_MS; performance.now() < end; ) if (condition()) return
    for (;;) {
      // First: the memory is gone once the group has ended, and whoever waits may be the last to hear of it.
      this.#requireRunning()
      const ticket = this.#mailbox.newsTicket
      if (condition()) return
      await this.#native.sleep(this.#mailbox.newsAddress, ticket)
    }
  }

  #failure(how: string): RankwiseError {
    if (this.#mailbox.state === STATE.failed) {
      const { code, what, details } = JSON.parse(this.#mailbox.text) as Failed
      return new RankwiseError(code, what, details)
    }
    return new RankwiseError('MPI_FAILED', `the MPI process has ended (${how})`, {
      rule: 'MPI runs until all ranks have left',
      remedy: 'look at the messages of the MPI library on standard error',
    })
  }
}

interface Failed {
  readonly code: string
  readonly what: string
  readonly details: RankwiseErrorDetails
}

const PAGE = 4096

/** The program lies beside this file, in the sources as in the package. */
const PROGRAM = fileURLToPath(new URL(`mpi-process-main${import.meta.url.slice(-3)}`, import.meta.url))

/** How this process was told to read TypeScript is needed there, too; a debugger can listen for one of them only. */
function programArguments(): string[] {
  return process.execArgv.filter((argument) => !argument.startsWith('--inspect'))
}
