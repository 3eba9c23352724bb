import { concat, rope, type TracedTensor } from '@rankwise/core'
import { isRounded } from './rounding.ts'

/**
 * Rotary position embedding of x `[batch, tokens, heads, headDim]` over the pairs (i, i + headDim / 2), by tables
 * `[tokens, headDim / 2]` of the same dtype. In 16 bits both products are rounded before they are added, as transformers
 * computes it; `rope`, which is that of diffusers, rounds once.
 */
export function rotate(x: TracedTensor, cos: TracedTensor, sin: TracedTensor): TracedTensor {
  if (!isRounded(x)) return rope(x, cos, sin, { interleaved: false })
  const [first, second] = x.chunk(2, -1) as [TracedTensor, TracedTensor]
  const [c, s] = [cos.unsqueeze(1), sin.unsqueeze(1)]
  return concat([first.mul(c).sub(second.mul(s)), second.mul(c).add(first.mul(s))], -1)
}
