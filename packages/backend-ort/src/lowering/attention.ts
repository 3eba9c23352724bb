import type { OnnxBuilder } from '../onnx/onnx-builder.ts'
import type { LoweringContext, LoweringRules, Operand } from './rule.ts'

type AttentionAttributes = { readonly scale: number; readonly causal: boolean }

/**
 * Both operators take `[batch, tokens, heads * headDim]`, so nothing is transposed here. MultiHeadAttention never holds
 * the whole score matrix (4608 tokens: 58 MB for 4 heads of 128, against 375 MB, and 1.5 times as fast), but only
 * without a mask. Attention knows grouped key heads, lets query i of a causal mask see keys 0 to i when there are more
 * keys than queries, and gives zeros where every key is masked; MultiHeadAttention gives NaN there.
 */
function attention(
  { onnx, attributes: { scale, causal }, outputs: [result] }: LoweringContext<AttentionAttributes>,
  q: Operand,
  k: Operand,
  v: Operand,
  bias?: Operand,
): readonly string[] {
  const shape = result?.shape ?? []
  const [, keys, kvHeads] = k.shape as [number, number, number, number]
  const heads = q.shape[2] as number
  if (keys === 0) return [onnx.filled(shape, 0)]
  const [query, key, value] = [q, k, v].map((operand) => joinHeads(onnx, operand)) as [string, string, string]
  const isPlain = bias === undefined && !causal && heads === kvHeads
  const mixed = isPlain
    ? onnx.op('com.microsoft.MultiHeadAttention', [query, key, value], { num_heads: { i: heads }, scale: { f: scale } })
    : onnx.op('Attention', bias === undefined ? [query, key, value] : [query, key, value, bias.name], {
        q_num_heads: { i: heads },
        kv_num_heads: { i: kvHeads },
        is_causal: { i: causal ? 1 : 0 },
        scale: { f: scale },
      })
  return [onnx.reshape(mixed, shape)]
}

/** x `[batch, tokens, heads, headDim]`; the position of a token is the row of cos and sin that turns it. */
function rope(
  { onnx, attributes: { interleaved } }: LoweringContext<{ readonly interleaved: boolean }>,
  x: Operand,
  cos: Operand,
  sin: Operand,
): readonly string[] {
  const [batch, tokens, heads] = x.shape as [number, number, number, number]
  const positions = BigInt64Array.from({ length: batch * tokens }, (_, i) => BigInt(i % tokens))
  const rotated = onnx.op(
    'RotaryEmbedding',
    [joinHeads(onnx, x), cos.name, sin.name, onnx.constant('int64', [batch, tokens], positions)],
    { num_heads: { i: heads }, interleaved: { i: interleaved ? 1 : 0 } },
  )
  return [onnx.reshape(rotated, x.shape)]
}

/** `[batch, tokens, heads, headDim]` as `[batch, tokens, heads * headDim]`; moves nothing. */
function joinHeads(onnx: OnnxBuilder, { name, shape }: Operand): string {
  const [batch, tokens, heads, headDim] = shape as [number, number, number, number]
  return onnx.reshape(name, [batch, tokens, heads * headDim])
}

export const attentionRules: LoweringRules = { attention, rope }
