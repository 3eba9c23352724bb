import { RankwiseError, type ShardSource, sizeOf, type Tensor, throwIfAborted } from '@rankwise/core'
import type { ComputeDType } from './device-dtype.ts'
import { TfjsTensor } from './device-tensor.ts'
import type { Engine, Ref } from './engine.ts'

/** How a weight is loaded. */
export interface WeightLoadOptions {
  /** What it is computed in. */
  readonly dtype: ComputeDType
  readonly signal: AbortSignal | undefined
}

/** The weights that a backend holds in its engine, in the order and dtype that its kernels take. */
export class WeightStore {
  readonly #engine: Engine
  readonly #weights = new Set<TfjsTensor>()
  /** Of shards that are being read. */
  #expectedBytes = 0

  constructor(engine: Engine) {
    this.#engine = engine
  }

  get bytes(): number {
    return [...this.#weights].reduce((sum, { byteLength }) => sum + byteLength, 0)
  }

  /** Refuses shards that do not fit beside what is there, before any of them is read. @throws RankwiseError `BACKEND_MEMORY` */
  requireRoom(sources: readonly ShardSource[], computed: ComputeDType = 'float32'): void {
    const heldBytes = this.bytes + this.#expectedBytes
    const shardBytes = sources.reduce((sum, source) => sum + this.#bytesOf(source, computed), 0)
    const limitBytes = this.#engine.maxWeightBytes
    if (heldBytes + shardBytes <= limitBytes) return
    throw new RankwiseError('BACKEND_MEMORY', `the weights do not fit into the engine ${this.#engine.name}`, {
      where: sources.length === 1 ? (sources[0] as ShardSource).name : `${sources.length} weights`,
      actual: { shardBytes, heldBytes, limitBytes },
      rule: 'the weights of a rank fit into the memory of the engine, in the dtype that it keeps them in',
      remedy: 'choose a higher tensor-parallel degree, or the native engine',
    })
  }

  /** @throws RankwiseError `BACKEND_MEMORY`, `ABORTED`, and those of the source */
  async load(source: ShardSource, { dtype, signal }: WeightLoadOptions): Promise<TfjsTensor> {
    throwIfAborted(signal, source.name)
    this.requireRoom([source], dtype)
    const bytes = this.#bytesOf(source, dtype)
    this.#expectedBytes += bytes
    try {
      const tensor = await source.read({ signal })
      throwIfAborted(signal, source.name)
      return this.add(tensor, dtype)
    } finally {
      this.#expectedBytes -= bytes
    }
  }

  dispose(): void {
    for (const weight of this.#weights) weight.dispose()
  }

  #bytesOf({ dtype, shape }: ShardSource, computed: ComputeDType): number {
    return sizeOf(shape) * (this.#engine.weightDType(dtype, shape, computed) === 'bfloat16' ? 2 : 4)
  }

  /**
   * Stores a weight that is on the host.
   *
   * @param computed - what it is computed in, and rounded to
   */
  add(tensor: Tensor, computed: ComputeDType): TfjsTensor {
    const engine = this.#engine
    const { shape } = tensor
    const kept = engine.weightDType(tensor.dtype, shape, computed)
    // What is kept in bfloat16 can be computed with in either dtype.
    const dtype = kept === 'bfloat16' ? kept : computed
    const order = sizeOf(shape) === 0 ? undefined : engine.weightOrder(shape)
    const [ref] = engine.tidy(() => {
      const written = engine.write(kept, shape, tensor.cast(computed === 'bfloat16' ? computed : kept).cast(kept).data)
      return [order === undefined ? written : engine.transpose(written, order)]
    })
    const weight = new TfjsTensor({ engine, ref: ref as Ref, dtype, shape, order }, (freed) =>
      this.#weights.delete(freed),
    )
    this.#weights.add(weight)
    return weight
  }
}
