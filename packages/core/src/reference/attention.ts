import { Tensor } from '../tensor.ts'
import type { Float64Tensor } from './kernel.ts'
import { dot } from './linear.ts'

type AttentionAttributes = { readonly scale: number; readonly causal: boolean }

/**
 * `softmax(q @ k.T * scale + bias) @ v` for every head; q `[batch, queries, heads, headDim]`, k and v
 * `[batch, keys, kvHeads, headDim]`, bias `[batch or 1, 1, queries, keys]`. Query head h reads key head
 * `floor(h * kvHeads / heads)`. Causal lets query i see keys 0 to i. A query that sees no key gives zeros.
 */
export function attention(
  { scale, causal }: AttentionAttributes,
  q: Float64Tensor,
  k: Float64Tensor,
  v: Float64Tensor,
  bias?: Float64Tensor,
): readonly Float64Tensor[] {
  const [batch, queries, heads, headDim] = q.shape as readonly [number, number, number, number]
  const [, keys, kvHeads, valueDim] = v.shape as readonly [number, number, number, number]
  const result = Tensor.zeros('float64', [batch, queries, heads, valueDim])
  const scores = new Float64Array(keys)
  // Head by head, so that the keys and values of one head stay in the cache while its queries pass by.
  for (let n = 0; n < batch * heads * queries; n++) {
    const [b, h, i] = [Math.floor(n / (heads * queries)), Math.floor(n / queries) % heads, n % queries]
    const row = (b * queries + i) * heads + h
    const head = { offset: b * keys * kvHeads + Math.floor((h * kvHeads) / heads), stride: kvHeads }
    score(scores, q.data.subarray(row * headDim, (row + 1) * headDim), k.data, head, scale)
    if (bias !== undefined) addScaled(scores, bias.data, ((b % (bias.shape[0] as number)) * queries + i) * keys, 1)
    if (causal) scores.fill(Number.NEGATIVE_INFINITY, i + 1)
    softmax(scores)
    mix(result.data.subarray(row * valueDim, (row + 1) * valueDim), scores, v.data, head)
  }
  return [result]
}

/** Where the rows of one key head are: row j is number `offset + j * stride`. */
interface HeadRows {
  readonly offset: number
  readonly stride: number
}

function score(scores: Float64Array, query: Float64Array, keys: Float64Array, head: HeadRows, scale: number): void {
  for (let j = 0; j < scores.length; j++) {
    scores[j] = scale * dot(query, 0, keys, (head.offset + j * head.stride) * query.length, query.length)
  }
}

function mix(output: Float64Array, weights: Float64Array, values: Float64Array, head: HeadRows): void {
  for (let j = 0; j < weights.length; j++) {
    addScaled(output, values, (head.offset + j * head.stride) * output.length, weights[j] as number)
  }
}

/** In place; all zeros where every score is -Infinity. */
function softmax(scores: Float64Array): void {
  const largest = scores.reduce((max, score) => Math.max(max, score), Number.NEGATIVE_INFINITY)
  if (largest === Number.NEGATIVE_INFINITY) {
    scores.fill(0)
    return
  }
  let sum = 0
  for (let i = 0; i < scores.length; i++) {
    scores[i] = Math.exp((scores[i] as number) - largest)
    sum += scores[i] as number
  }
  for (let i = 0; i < scores.length; i++) scores[i] = (scores[i] as number) / sum
}

function addScaled(sum: Float64Array, values: Float64Array, start: number, scale: number): void {
  for (let i = 0; i < sum.length; i++) sum[i] = (sum[i] as number) + scale * (values[start + i] as number)
}

/**
 * Rotates pairs of x `[batch, tokens, heads, headDim]` by the angles whose cos and sin are `[tokens, headDim / 2]`:
 * (2i, 2i + 1) if interleaved, else (i, i + headDim / 2).
 */
export function rope(
  { interleaved }: { readonly interleaved: boolean },
  x: Float64Tensor,
  cos: Float64Tensor,
  sin: Float64Tensor,
): readonly Float64Tensor[] {
  const [, tokens, heads, headDim] = x.shape as readonly [number, number, number, number]
  const half = headDim / 2
  const result = Tensor.zeros('float64', x.shape)
  for (let row = 0; row < x.data.length / headDim; row++) {
    const token = Math.floor(row / heads) % tokens
    for (let i = 0; i < half; i++) {
      const first = row * headDim + (interleaved ? 2 * i : i)
      const second = interleaved ? first + 1 : first + half
      const [c, s] = [cos.data[token * half + i] as number, sin.data[token * half + i] as number]
      const [a, b] = [x.data[first] as number, x.data[second] as number]
      result.data[first] = a * c - b * s
      result.data[second] = b * c + a * s
    }
  }
  return [result]
}
