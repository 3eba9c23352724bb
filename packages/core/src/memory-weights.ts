import type { Backend, DeviceTensor } from './backend.ts'
import { ReadStats, type ShardSource, type TensorInfo, type WeightSource } from './checkpoint/index.ts'
import { shardLayout } from './checkpoint/shard-layout.ts'
import { readableTensor } from './checkpoint/tensor-info.ts'
import { itemSize } from './dtype.ts'
import type { ShardSlices } from './placement.ts'
import { sliceTensor } from './slice-tensor.ts'
import { byteSizeOf } from './tensor.ts'

/** Whole weights that a backend holds, as a source of shards: how a loaded model is split. */
export class MemoryWeights implements WeightSource {
  readonly location: string
  readonly tensors: ReadonlyMap<string, TensorInfo>
  readonly stats: ReadStats = new ReadStats()
  readonly #backend: Backend
  readonly #weights: ReadonlyMap<string, DeviceTensor>

  constructor(model: string, backend: Backend, weights: ReadonlyMap<string, DeviceTensor>) {
    this.location = `${model} in memory`
    this.#backend = backend
    this.#weights = weights
    this.tensors = new Map([...weights].map(([name, { dtype, shape }]) => [name, this.#info(name, { dtype, shape })]))
  }

  source(name: string, slices?: ShardSlices): ShardSource {
    const { dtype, shape: fullShape, file } = readableTensor(this.tensors, name, this.location)
    const { shape, byteLength } = shardLayout(fullShape, itemSize(dtype), slices, name)
    return {
      name,
      file,
      dtype,
      fullShape,
      slices,
      shape,
      byteLength,
      ranges: () => undefined,
      read: async () => {
        const part = sliceTensor(await this.#backend.download(this.#weights.get(name) as DeviceTensor), slices)
        this.stats.countBuffer(name, part.byteLength)
        this.stats.tensorsRead++
        return part
      },
    }
  }

  /** The weights belong to the model. */
  async [Symbol.asyncDispose](): Promise<void> {}

  #info(name: string, { dtype, shape }: Pick<DeviceTensor, 'dtype' | 'shape'>): TensorInfo {
    return { name, dtype, shape, file: this.location, byteOffset: 0, byteLength: byteSizeOf(shape, dtype) }
  }
}
