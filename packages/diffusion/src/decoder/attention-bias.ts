import { Tensor } from '@rankwise/core'

/**
 * What is added to the scores of `[batch, 1, queries, keys]`: 0 where a query may see a key, -Infinity where the key
 * comes later or is padding.
 *
 * @param attentionMask - `[batch, tokens]`: 1 for a token, 0 for padding
 */
export function causalAttentionBias(attentionMask: Tensor<'int32'>): Tensor<'float32'> {
  const [batch, tokens] = attentionMask.shape as readonly [number, number]
  const bias = Tensor.float32([batch, 1, tokens, tokens], new Float32Array(batch * tokens * tokens).fill(-Infinity))
  for (let row = 0; row < batch * tokens; row++) {
    const [first, query] = [row - (row % tokens), row % tokens]
    for (let key = 0; key <= query; key++) {
      if (attentionMask.data[first + key] === 1) bias.data[row * tokens + key] = 0
    }
  }
  return bias
}
