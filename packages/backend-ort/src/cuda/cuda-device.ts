import type { DeviceMemory, DeviceTensor, Segment, ShardSource, Tensor } from '@rankwise/core'
import type { ComputeDevice, LoadedWeight } from '../device.ts'
import { OrtExecutable, type Tensors } from '../executable.ts'
import { type HostDType, hostDType } from '../host-dtype.ts'
import { WeightLoader, type WeightLoadOptions } from '../weight-loader.ts'
import type { WeightDType } from '../weight-storage.ts'
import type { CudaEngine } from './cuda-engine.ts'
import type { GpuBuffer } from './gpu-memory.ts'
import { GpuTensor } from './gpu-tensor.ts'
import { checkIds, lookupsOf } from './ids.ts'

/** A GPU: values and weights are in its memory. */
export class CudaDevice implements ComputeDevice {
  readonly name: string
  readonly engine: CudaEngine
  readonly deviceMemory: DeviceMemory
  readonly #loader = new WeightLoader('read', undefined)

  constructor(engine: CudaEngine) {
    const { stream, deviceId } = engine
    this.name = `cuda:${deviceId}`
    this.engine = engine
    this.deviceMemory = { stream, borrow: (tensor) => GpuTensor.from(tensor).tensor }
  }

  /** Reads a weight and copies it to the GPU; memory of the host is taken by one weight at a time, until it is there. */
  async load(
    source: ShardSource,
    options: WeightLoadOptions,
    onDispose: (weight: LoadedWeight) => void,
  ): Promise<LoadedWeight> {
    const { memory } = this.engine
    const { pieces } = await this.#loader.load(source, options)
    const free = (buffer: GpuBuffer) => memory.release(buffer)
    const weight = GpuTensor.upload(pieces[0] as Tensor<WeightDType>, memory, { free, onDispose })
    try {
      await weight.ready
      return weight
    } catch (error) {
      weight.dispose()
      throw error
    }
  }

  async compile(
    segment: Segment,
    parameters: readonly DeviceTensor[] | undefined,
    onDispose: (executable: OrtExecutable) => void,
  ): Promise<OrtExecutable> {
    const lookups = lookupsOf(segment)
    const tensors: Tensors<GpuBuffer, GpuTensor> = {
      value: GpuTensor.from,
      weight: GpuTensor.weight,
      result: (buffer) => new GpuTensor(buffer, { free: (freed) => this.engine.recycle(freed) }),
      checkInputs: (values) => checkIds(lookups, values),
    }
    return OrtExecutable.compile(segment, { engine: this.engine, tensors, parameters, onDispose })
  }

  /** Copies it, in the background. */
  upload(tensor: Tensor): DeviceTensor {
    const { memory } = this.engine
    hostDType(tensor.dtype, 'tensor')
    return GpuTensor.upload(tensor as Tensor<HostDType>, memory, { free: (buffer) => memory.give(buffer) })
  }

  async download(tensor: DeviceTensor): Promise<Tensor> {
    const value = GpuTensor.from(tensor)
    const { tensor: buffer } = value
    value.retain()
    try {
      await value.ready
      return await this.engine.memory.read(buffer)
    } finally {
      value.release()
    }
  }

  dispose(): Promise<void> {
    return this.engine.dispose()
  }
}
