/** TensorFlow's numbers of dtypes (TF_DataType) that tfjs-node does not export. */
export const TF_BFLOAT16 = 14
export const TF_COMPLEX64 = 8

/** A result of an operation, in TensorFlow's memory. */
export interface TensorMetadata {
  readonly id: number
  readonly shape: number[]
  readonly dtype: number
}

/** An attribute of an operation. */
export interface OpAttribute {
  readonly name: string
  /** One of the `TF_ATTR_*`. */
  readonly type: number
  readonly value: boolean | number | string | readonly number[]
}

/** The addon of tfjs-node 4.22.0: TensorFlow's eager operations. One per process, with one device. */
export interface TfjsBinding {
  /** Takes the memory of `data` over where its address is a multiple of 64, and copies it elsewhere. */
  createTensor(shape: number[], dtype: number, data: Float32Array | Int32Array | Uint8Array): number
  deleteTensor(id: number): void
  /** A copy; of float32 and int32 only. */
  tensorDataSync(id: number): Float32Array | Int32Array
  executeOp(
    name: string,
    attributes: readonly OpAttribute[],
    inputs: readonly number[],
    results: number,
  ): TensorMetadata[]
  getNumOfTensors(): number
  isUsingGpuDevice(): boolean
  readonly TF_FLOAT: number
  readonly TF_INT32: number
  readonly TF_UINT8: number
  readonly TF_ATTR_STRING: number
  readonly TF_ATTR_INT: number
  readonly TF_ATTR_BOOL: number
  readonly TF_ATTR_TYPE: number
  readonly TF_Version: string
}
