import type { DeviceTensor } from './backend.ts'
import type { DType } from './dtype.ts'
import type { Shape } from './tensor.ts'

/** A contiguous tensor in the memory of this rank's GPU; whoever allocated it keeps it until the operation is over. */
export interface DeviceBuffer {
  /** Address on the device, as torch's `data_ptr()`. */
  readonly dataPtr: bigint
  readonly dtype: DType
  readonly shape: Shape
}

/** The memory of a GPU that a backend keeps its values in. */
export interface DeviceMemory {
  /**
   * The stream that everything the backend does is queued on (a `cudaStream_t`). Whatever else is put into it once a run
   * has resolved sees the results of that run, and the next run sees what was put into it.
   */
  readonly stream: bigint
  /**
   * The memory of a value: an all-reduce writes to it, and nothing keeps it after the value is disposed.
   *
   * @throws RankwiseError `TENSOR_DISPOSED`, `TENSOR_FOREIGN`
   */
  borrow(tensor: DeviceTensor): DeviceBuffer
}
