import type { DeviceMemory, DeviceTensor, Segment, ShardSource, Tensor } from '@rankwise/core'
import type { EngineName } from './engine/engine.ts'
import type { OrtExecutable } from './executable.ts'
import type { WeightLoadOptions } from './weight-loader.ts'

/** A weight where it is computed with. */
export interface LoadedWeight extends DeviceTensor {
  readonly byteLength: number
  /** Whether it lies in its file, and not in memory of its own. */
  readonly isMapped: boolean
}

/** Where a backend keeps its tensors and computes. */
export interface ComputeDevice {
  /** `cpu`, or `cuda:0`, as torch names them. */
  readonly name: string
  readonly engine: { readonly name: EngineName; readonly threads: number }
  /** Of values that are in memory of a GPU. */
  readonly deviceMemory?: DeviceMemory
  load(
    source: ShardSource,
    options: WeightLoadOptions,
    onDispose: (weight: LoadedWeight) => void,
  ): Promise<LoadedWeight>
  compile(
    segment: Segment,
    parameters: readonly DeviceTensor[] | undefined,
    onDispose: (executable: OrtExecutable) => void,
  ): Promise<OrtExecutable>
  upload(tensor: Tensor): DeviceTensor
  download(tensor: DeviceTensor): Promise<Tensor>
  /** Of values that are in memory of the host. */
  borrow?(tensor: DeviceTensor): Tensor
  /** After its executables and weights were disposed. */
  dispose(): Promise<void>
}
