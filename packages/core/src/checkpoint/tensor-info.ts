import type { DType } from '../dtype.ts'
import { RankwiseError } from '../errors.ts'
import type { Shape } from '../tensor.ts'
import { isSupported, type StoredDType } from './safetensors-dtype.ts'
import { quoteName } from './strict-json.ts'

/** What a tensor of a file is and where it lies. */
export interface TensorInfo {
  readonly name: string
  /** Torch's name; the format's own for a dtype that Rankwise cannot read. */
  readonly dtype: StoredDType
  readonly shape: Shape
  /** Absolute path of the file. */
  readonly file: string
  /** Of the first byte, from the start of the file. Any number: the format aligns nothing. */
  readonly byteOffset: number
  readonly byteLength: number
}

/** A tensor that can be read. */
export type ReadableTensorInfo = TensorInfo & { readonly dtype: DType }

/** How an error names a tensor of a file. */
export function whereIs(file: string, name: string): string {
  return `${file}, tensor ${quoteName(name)}`
}

/**
 * Looks up a tensor that is to be read.
 *
 * @param tensors Of `place`, a file or folder.
 * @throws RankwiseError `TENSOR_NOT_FOUND`, `SAFETENSORS_DTYPE_UNSUPPORTED`
 */
export function readableTensor(
  tensors: ReadonlyMap<string, TensorInfo>,
  name: string,
  place: string,
): ReadableTensorInfo {
  const info = tensors.get(name)
  if (info === undefined) {
    throw new RankwiseError('TENSOR_NOT_FOUND', 'there is no such tensor', {
      where: whereIs(place, name),
      actual: { tensors: tensors.size },
    })
  }
  const { dtype } = info
  if (isSupported(dtype)) return { ...info, dtype }
  throw new RankwiseError('SAFETENSORS_DTYPE_UNSUPPORTED', `tensors of dtype ${dtype} cannot be read`, {
    where: whereIs(info.file, name),
    actual: { dtype, shape: info.shape },
    rule: 'readable are F64, F32, F16, BF16, I64, I32, I16, I8, U8 and BOOL',
    remedy: 'use a checkpoint that is not quantized',
  })
}
