import { setTimeout } from 'node:timers/promises'
import { RankwiseError } from '@rankwise/core'
import type { Address, CudaRuntime, PinnedMemory } from './cuda-runtime.ts'
import type { Channel, Nccl } from './nccl.ts'
import type { Turn, Watch } from './watch.ts'

/** How long freeing may take: NCCL waits for its threads and for kernels that were told to stop. */
const CLOSE_MS = 5_000
/** How long an operation that failed waits for the GPU to let go of its buffers before it says so. */
const LET_GO_MS = 500

/** Who takes part in a communicator. */
export interface CommunicatorOptions {
  readonly device: number
  readonly rank: number
  readonly worldSize: number
  readonly uniqueId: Uint8Array
}

/**
 * A communicator of NCCL that never blocks, with a stream of its own. Every call to NCCL is only started here; it is
 * over when NCCL says that it is ready (until then another call would be refused), and done when an event that follows
 * it in the stream has happened. Memory and events that belong to it are freed with it, once NCCL uses them no more.
 */
export class Communicator {
  readonly cuda: CudaRuntime
  readonly nccl: Nccl
  readonly channel: Channel
  readonly #watch: Watch
  readonly #device: number
  readonly #owned: (() => void)[] = []
  #closed: Promise<void> | undefined

  private constructor(cuda: CudaRuntime, nccl: Nccl, watch: Watch, device: number, channel: Channel) {
    this.cuda = cuda
    this.nccl = nccl
    this.channel = channel
    this.#watch = watch
    this.#device = device
  }

  /** Resolves when all ranks have joined; what was taken is freed if they do not. */
  static async join(
    cuda: CudaRuntime,
    nccl: Nccl,
    watch: Watch,
    turn: Turn,
    { device, rank, worldSize, uniqueId }: CommunicatorOptions,
  ): Promise<Communicator> {
    await cuda.warmUp(device)
    cuda.setDevice(device)
    const stream = cuda.createStream()
    let communicator: Communicator | undefined
    try {
      const comm = nccl.initRank(worldSize, uniqueId, rank)
      communicator = new Communicator(cuda, nccl, watch, device, { comm, stream })
      await watch.until(turn, () => nccl.isReady(comm))
      return communicator
    } catch (error) {
      // The error that brought us here counts, not one of cleaning up.
      if (communicator === undefined) cuda.destroyStream(stream)
      else await communicator.abort().catch(() => {})
      throw error
    }
  }

  /** Memory of the device. */
  allocate(bytes: number): Address {
    this.#enter()
    return this.#own(this.cuda.allocate(bytes), (address) => this.cuda.free(address))
  }

  allocatePinned(bytes: number): PinnedMemory {
    this.#enter()
    return this.#own(this.cuda.allocatePinned(bytes), (memory) => this.cuda.freePinned(memory))
  }

  createEvent(): Address {
    this.#enter()
    return this.#own(this.cuda.createEvent(), (event) => this.cuda.destroyEvent(event))
  }

  /** Resolves when what `call` starts is in the stream. */
  async issue(turn: Turn, call: () => void): Promise<void> {
    call()
    await this.#watch.until(turn, () => this.nccl.isReady(this.channel.comm))
  }

  /** Resolves when `event` has happened. */
  async done(turn: Turn, event: Address): Promise<void> {
    await this.#watch.until(turn, () => this.nccl.isReady(this.channel.comm) && this.cuda.hasHappened(event))
  }

  /** Waits a moment for the GPU to let go of the buffers of an operation that failed. */
  async letGo(): Promise<void> {
    await Promise.race([this.abort().catch(() => {}), setTimeout(LET_GO_MS)])
  }

  /**
   * Stops what runs on the GPU and frees everything; idempotent. Nothing can be issued any more.
   *
   * @throws RankwiseError `NCCL_CLOSE` when NCCL does not stop in time: then what it uses is not freed
   */
  abort(): Promise<void> {
    this.#closed ??= this.#free(this.nccl.abort(this.channel.comm, CLOSE_MS))
    return this.#closed
  }

  /** Ends without haste: what is in the stream is done first. As {@link abort} otherwise. */
  close(): Promise<void> {
    this.#closed ??= this.#finish()
    return this.#closed
  }

  async #finish(): Promise<void> {
    const { comm } = this.channel
    if (await this.#isFinalized()) await this.#free(this.nccl.destroy(comm, CLOSE_MS))
    else await this.#free(this.nccl.abort(comm, CLOSE_MS))
  }

  async #isFinalized(): Promise<boolean> {
    const { comm } = this.channel
    const deadline = performance.now() + CLOSE_MS
    try {
      this.nccl.finalize(comm)
      while (!this.nccl.isReady(comm)) {
        if (performance.now() > deadline) return false
        await setTimeout(1)
      }
      return true
    } catch {
      // Whatever is wrong with it, aborting is what is left to do.
      return false
    }
  }

  async #free(stopped: Promise<number | undefined>): Promise<void> {
    if ((await stopped) === undefined) throw notStopped()
    this.#enter()
    for (const free of this.#owned.splice(0).reverse()) free()
    this.cuda.destroyStream(this.channel.stream)
  }

  #own<T>(resource: T, free: (resource: T) => void): T {
    this.#owned.push(() => free(resource))
    return resource
  }

  /** Makes the device of this rank the current one, which other code of this thread may have changed. */
  #enter(): void {
    this.cuda.setDevice(this.#device)
  }
}

function notStopped(): RankwiseError {
  return new RankwiseError('NCCL_CLOSE', 'NCCL did not stop in time', {
    actual: { waitedMs: CLOSE_MS },
    rule: 'NCCL stops its threads and kernels when it is told to',
    remedy: 'end this process: its GPU memory and NCCL threads are not freed before',
  })
}
