import type { DeviceTensor, Segment, ShardSource, Tensor } from '@rankwise/core'
import type { ComputeDevice, LoadedWeight } from './device.ts'
import type { Engine } from './engine/engine.ts'
import { OrtExecutable, type Tensors } from './executable.ts'
import { HostTensor } from './host-tensor.ts'
import type { WeightLoader, WeightLoadOptions } from './weight-loader.ts'
import { WeightTensor } from './weight-tensor.ts'

/** The CPU: values are in memory of the process, weights there or in mapped files. */
export class HostDevice implements ComputeDevice {
  readonly name = 'cpu'
  readonly engine: Engine
  readonly #loader: WeightLoader
  readonly #tensors: Tensors<Tensor>

  constructor(engine: Engine, loader: WeightLoader) {
    this.engine = engine
    this.#loader = loader
    this.#tensors = {
      value: HostTensor.from,
      weight: WeightTensor.from,
      result: (tensor) => new HostTensor(tensor, (freed) => engine.recycle(freed)),
    }
  }

  async load(
    source: ShardSource,
    options: WeightLoadOptions,
    onDispose: (weight: LoadedWeight) => void,
  ): Promise<LoadedWeight> {
    return new WeightTensor(await this.#loader.load(source, options), onDispose)
  }

  compile(
    segment: Segment,
    parameters: readonly DeviceTensor[] | undefined,
    onDispose: (executable: OrtExecutable) => void,
  ): Promise<OrtExecutable> {
    return OrtExecutable.compile(segment, { engine: this.engine, tensors: this.#tensors, parameters, onDispose })
  }

  upload(tensor: Tensor): DeviceTensor {
    return new HostTensor(tensor)
  }

  async download(tensor: DeviceTensor): Promise<Tensor> {
    return tensor instanceof WeightTensor ? tensor.whole() : HostTensor.from(tensor).give()
  }

  borrow(tensor: DeviceTensor): Tensor {
    return HostTensor.from(tensor).tensor
  }

  dispose(): Promise<void> {
    return this.engine.dispose()
  }
}
