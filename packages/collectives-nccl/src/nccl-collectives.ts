import {
  allocate,
  bytesOf,
  type CollectiveOptions,
  type Collectives,
  type DeviceBuffer,
  type DeviceOptions,
  packByDtype,
  type ReduceOp,
  sizeOf,
  Tensor,
} from '@rankwise/core'
import { describeOperation, type Operation, requireValid } from '@rankwise/core/collectives'
import { broadcastChunks, type ChunkContext, gatherChunks, reduceChunks, scatterChunks } from './chunks.ts'
import type { Communicator } from './communicator.ts'
import type { Address } from './cuda-runtime.ts'
import { contentsOf, requireOutput } from './device-buffer.ts'
import { Fingerprints } from './fingerprints.ts'
import { REDUCIBLE_DTYPES } from './nccl-types.ts'
import { type Chunk, Staging } from './staging.ts'
import type { Turn, Watch } from './watch.ts'

/** `op` of an operation that reduces. @default 'sum' */
type WithOp<T> = T & { readonly op?: ReduceOp }
/** `source` of a broadcast. @default 0 */
type WithSource<T> = T & { readonly source?: number }

/** What a group is made of. */
export interface NcclCollectivesParts {
  readonly communicator: Communicator
  readonly watch: Watch
  readonly rank: number
  readonly worldSize: number
  readonly stagingBytes: number
  readonly checkFirst: number
  /** What is left to do when the group is destroyed. */
  readonly release?: (() => Promise<void>) | undefined
}

/**
 * Collectives over NCCL. Tensors of host memory go through pinned memory and the GPU; buffers that are on the GPU
 * already are worked on where they are. Operations that are called without waiting run one after the other.
 *
 * All ranks get the same result of an all-reduce, but NCCL adds in an order of its own (ring, tree), which may change
 * with size, topology and version: sums of floats are not those in rank order.
 *
 * @throws RankwiseError beside what `Collectives` throws, `NCCL_ERROR` and `CUDA_ERROR` with the words of the libraries
 */
export class NcclCollectives implements Collectives {
  readonly name = 'nccl'
  readonly rank: number
  readonly worldSize: number
  readonly #communicator: Communicator
  readonly #watch: Watch
  readonly #fingerprints: Fingerprints
  readonly #staging: Staging
  readonly #chunks: ChunkContext
  readonly #checkFirst: number
  readonly #release: (() => Promise<void>) | undefined
  /** Orders the stream of NCCL behind that of the caller, and marks the end of an operation on device memory. */
  readonly #event: Address
  #sequence = 0
  #last: Promise<unknown> = Promise.resolve()
  #destroyed: Promise<void> | undefined

  constructor({ communicator, watch, rank, worldSize, stagingBytes, checkFirst, release }: NcclCollectivesParts) {
    this.rank = rank
    this.worldSize = worldSize
    this.#communicator = communicator
    this.#watch = watch
    this.#fingerprints = new Fingerprints(communicator, watch, rank, worldSize)
    this.#staging = new Staging(communicator, stagingBytes)
    this.#chunks = { communicator, rank, worldSize, slotBytes: stagingBytes }
    this.#checkFirst = checkFirst
    this.#release = release
    this.#event = communicator.createEvent()
  }

  async allReduce(tensors: readonly Tensor[], { op = 'sum', signal }: WithOp<CollectiveOptions> = {}): Promise<void> {
    await this.#run({ kind: 'allReduce', reduceOp: op, tensors }, signal, async (turn) => {
      for (const packed of packByDtype(tensors)) await this.#stage(turn, reduceChunks(this.#chunks, packed, op))
    })
  }

  async allGather(tensor: Tensor, { signal }: CollectiveOptions = {}): Promise<Tensor> {
    return this.#run({ kind: 'allGather', tensors: [tensor] }, signal, async (turn) => {
      const output = allocateRows(tensor, (tensor.shape[0] as number) * this.worldSize)
      await this.#stage(turn, gatherChunks(this.#chunks, bytesOf(tensor), bytesOf(output)))
      return output
    })
  }

  async reduceScatter(tensor: Tensor, { op = 'sum', signal }: WithOp<CollectiveOptions> = {}): Promise<Tensor> {
    return this.#run({ kind: 'reduceScatter', reduceOp: op, tensors: [tensor] }, signal, async (turn) => {
      const output = allocateRows(tensor, (tensor.shape[0] as number) / this.worldSize)
      await this.#stage(turn, scatterChunks(this.#chunks, tensor, output, op))
      return output
    })
  }

  async broadcast(tensor: Tensor, { source = 0, signal }: WithSource<CollectiveOptions> = {}): Promise<void> {
    await this.#run({ kind: 'broadcast', source, tensors: [tensor] }, signal, (turn) =>
      this.#stage(turn, broadcastChunks(this.#chunks, bytesOf(tensor), source)),
    )
  }

  async barrier({ signal }: CollectiveOptions = {}): Promise<void> {
    await this.#run({ kind: 'barrier', tensors: [] }, signal, async () => {})
  }

  /** As {@link allReduce}, in device memory. */
  async allReduceOnDevice(
    buffers: readonly DeviceBuffer[],
    { op = 'sum', ...options }: WithOp<DeviceOptions> = {},
  ): Promise<void> {
    await this.#runOnDevice({ kind: 'allReduce', reduceOp: op }, buffers, options, ({ nccl, channel }) =>
      nccl.group(() => {
        for (const buffer of buffers)
          nccl.allReduce({ ...inPlace(buffer), count: sizeOf(buffer.shape) }, buffer.dtype, op, channel)
      }),
    )
  }

  /** As {@link allGather}, in device memory; `output` has `worldSize` times the rows of `input`. */
  async allGatherOnDevice(input: DeviceBuffer, output: DeviceBuffer, options: DeviceOptions = {}): Promise<void> {
    const check = () => requireOutput('allGather', input, output, (input.shape[0] as number) * this.worldSize)
    await this.#runOnDevice(
      { kind: 'allGather' },
      [input],
      options,
      ({ nccl, channel }) => {
        const span = { send: input.dataPtr, receive: output.dataPtr, count: contentsOf(input).byteLength }
        nccl.allGather(span, channel)
      },
      check,
    )
  }

  /** As {@link reduceScatter}, in device memory; `output` has `1 / worldSize` of the rows of `input`. */
  async reduceScatterOnDevice(
    input: DeviceBuffer,
    output: DeviceBuffer,
    { op = 'sum', ...options }: WithOp<DeviceOptions> = {},
  ): Promise<void> {
    const check = () => requireOutput('reduceScatter', input, output, (input.shape[0] as number) / this.worldSize)
    await this.#runOnDevice(
      { kind: 'reduceScatter', reduceOp: op },
      [input],
      options,
      ({ nccl, channel }) => {
        const span = { send: input.dataPtr, receive: output.dataPtr, count: sizeOf(output.shape) }
        nccl.reduceScatter(span, input.dtype, op, channel)
      },
      check,
    )
  }

  /** As {@link broadcast}, in device memory. */
  async broadcastOnDevice(
    buffer: DeviceBuffer,
    { source = 0, ...options }: WithSource<DeviceOptions> = {},
  ): Promise<void> {
    await this.#runOnDevice({ kind: 'broadcast', source }, [buffer], options, ({ nccl, channel }) =>
      nccl.broadcast({ ...inPlace(buffer), count: contentsOf(buffer).byteLength }, source, channel),
    )
  }

  abort(reason: Error): void {
    if (this.#destroyed !== undefined) return
    const what = `rank ${this.rank} aborted the group: ${reason.message}`
    this.#watch.fail({ code: 'ABORTED', what, ranks: [this.rank], cause: reason })
  }

  /** @throws RankwiseError `NCCL_CLOSE` when NCCL does not stop within 5 s */
  destroy(): Promise<void> {
    this.#destroyed ??= this.#leave()
    return this.#destroyed
  }

  /** `destroy`, for `await using`. */
  [Symbol.asyncDispose](): Promise<void> {
    return this.destroy()
  }

  async #leave(): Promise<void> {
    const { failed } = this.#watch
    this.#watch.leave()
    await this.#last
    try {
      // An operation that did not end well has aborted the communicator already.
      await (failed ? this.#communicator.abort() : this.#communicator.close())
    } finally {
      await this.#watch.settled()
      await this.#release?.()
    }
  }

  /** Takes a number even for a call that is refused: a rank that goes on after it must not be taken for in step. */
  #run<T>(
    call: Omit<Operation, 'sequence'>,
    signal: AbortSignal | undefined,
    body: (turn: Turn) => Promise<T>,
    check?: () => void,
  ): Promise<T> {
    this.#sequence += 1
    const operation = { ...call, sequence: this.#sequence }
    requireValid(operation, this.worldSize, REDUCIBLE_DTYPES)
    check?.()
    const result = this.#last.then(() => this.#turn(operation, signal, body))
    this.#last = result.catch(() => {})
    return result
  }

  async #turn<T>(operation: Operation, signal: AbortSignal | undefined, body: (turn: Turn) => Promise<T>): Promise<T> {
    const { sequence, kind } = operation
    const describe = () => describeOperation(operation)
    const turn = this.#watch.begin({ sequence, name: `${kind} #${sequence}`, describe, signal })
    try {
      return await this.#watch.run(turn, async () => {
        // The comparison is all that a barrier needs: it ends when every rank takes part in it.
        if (sequence <= this.#checkFirst || kind === 'barrier') await this.#fingerprints.compare(turn, operation)
        return body(turn)
      })
    } catch (error) {
      await this.#communicator.letGo()
      throw error
    }
  }

  #runOnDevice(
    call: Omit<Operation, 'sequence' | 'tensors' | 'onDevice'>,
    buffers: readonly DeviceBuffer[],
    { signal, stream = 0n }: DeviceOptions,
    issue: (communicator: Communicator) => void,
    check?: () => void,
  ): Promise<void> {
    const operation = { ...call, tensors: buffers.map(contentsOf), onDevice: true }
    return this.#run(
      operation,
      signal,
      async (turn) => {
        if (operation.tensors.every(({ byteLength }) => byteLength === 0)) return
        const { cuda, channel } = this.#communicator
        cuda.recordEvent(this.#event, stream)
        cuda.waitForEvent(channel.stream, this.#event)
        await this.#communicator.issue(turn, () => issue(this.#communicator))
        cuda.recordEvent(this.#event, channel.stream)
        await this.#communicator.done(turn, this.#event)
      },
      check,
    )
  }

  #stage(turn: Turn, chunks: Iterable<Chunk>): Promise<void> {
    return this.#staging.run(turn, chunks)
  }
}

function inPlace({ dataPtr }: DeviceBuffer): { send: Address; receive: Address } {
  return { send: dataPtr, receive: dataPtr }
}

function allocateRows({ dtype, shape }: Tensor, rows: number): Tensor {
  const outputShape = [rows, ...shape.slice(1)]
  return new Tensor(dtype, outputShape, allocate(dtype, sizeOf(outputShape)))
}
