import { Tensor } from '@rankwise/core'

/**
 * Rotary tables of position ids, each `[tokens, headDim / 2]`: every axis of the ids turns its own share of the head.
 * Angles are computed in float64 and rounded once, as the reference does.
 *
 * @param ids - int32 `[tokens, axes]`, the (T, H, W, L) coordinates of each token
 * @param axesDims - how much of headDim each axis has; their sum is headDim
 */
export function rotaryTables(
  ids: Tensor,
  axesDims: readonly number[],
  theta: number,
): { readonly cos: Tensor<'float32'>; readonly sin: Tensor<'float32'> } {
  const [tokens, axes] = ids.shape as readonly [number, number]
  const frequencies = axesDims.flatMap((dim, axis) =>
    Array.from({ length: dim / 2 }, (_, i) => ({ axis, frequency: 1 / theta ** ((2 * i) / dim) })),
  )
  const width = frequencies.length
  const cos = Tensor.zeros('float32', [tokens, width])
  const sin = Tensor.zeros('float32', [tokens, width])
  for (let token = 0; token < tokens; token++) {
    for (const [i, { axis, frequency }] of frequencies.entries()) {
      const angle = Number(ids.data[token * axes + axis]) * frequency
      cos.data[token * width + i] = Math.cos(angle)
      sin.data[token * width + i] = Math.sin(angle)
    }
  }
  return { cos, sin }
}
