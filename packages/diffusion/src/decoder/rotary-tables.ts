import { Tensor } from '@rankwise/core'

const { fround } = Math

/**
 * Rotary tables of positions 0 … tokens - 1, each `[tokens, headDim / 2]`, as transformers' rotary embeddings compute
 * them: frequencies `1 / theta ** (2i / headDim)` and angles are rounded to float32 before the cosine, which moves an
 * angle below position 512 by up to 3.7e-5.
 */
export function rotaryTables(
  tokens: number,
  headDim: number,
  theta: number,
): { readonly cos: Tensor<'float32'>; readonly sin: Tensor<'float32'> } {
  const width = headDim / 2
  const frequencies = Array.from({ length: width }, (_, i) => fround(1 / fround(theta ** fround((2 * i) / headDim))))
  const cos = Tensor.zeros('float32', [tokens, width])
  const sin = Tensor.zeros('float32', [tokens, width])
  for (let position = 0; position < tokens; position++) {
    for (const [i, frequency] of frequencies.entries()) {
      const angle = fround(position * frequency)
      cos.data[position * width + i] = Math.cos(angle)
      sin.data[position * width + i] = Math.sin(angle)
    }
  }
  return { cos, sin }
}
