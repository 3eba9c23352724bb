import { type DType, RankwiseError, type Shape, Tensor, textOf } from '@rankwise/core'
import type { LatentDType } from '@rankwise/diffusion'

/** Latents, prompt embeddings or what a model makes of them, in the dtype that the model computes in. */
export type LatentTensor = Tensor<LatentDType>

const LATENT_DTYPES: readonly string[] = ['float32', 'bfloat16', 'float16'] satisfies readonly LatentDType[]

/**
 * A tensor of which only that it is one is known.
 *
 * @param where - the option or the model that it comes from
 * @throws RankwiseError `DTYPE_UNSUPPORTED`
 */
export function latentTensor(tensor: Tensor, where: string): LatentTensor {
  requireLatentDType(tensor.dtype, where)
  return tensor as LatentTensor
}

/** What a model computes in, as the dtype of latents. @throws RankwiseError `DTYPE_UNSUPPORTED`, `MODEL_NOT_LOADED` */
export function latentDTypeOf({ dtype }: { readonly dtype: DType }, where: string): LatentDType {
  requireLatentDType(dtype, where)
  return dtype as LatentDType
}

function requireLatentDType(dtype: DType, where: string): void {
  if (LATENT_DTYPES.includes(dtype)) return
  throw new RankwiseError('DTYPE_UNSUPPORTED', `latents and embeddings are not of ${textOf(dtype)}`, {
    where,
    actual: { dtype },
    rule: `their dtype is one of ${LATENT_DTYPES.join(', ')}`,
  })
}

/** Copies pieces of tensors of one dtype into a new one, piece by piece from its start. */
export function gather(
  dtype: LatentDType,
  shape: Shape,
  pieces: Iterable<readonly [from: LatentTensor, start: number, length: number]>,
): LatentTensor {
  const result: LatentTensor = Tensor.zeros(dtype, shape)
  let at = 0
  for (const [{ data }, start, length] of pieces) {
    result.data.set(data.subarray(start, start + length), at)
    at += length
  }
  return result
}
