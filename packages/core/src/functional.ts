import { activeTrace } from './active-trace.ts'
import { RankwiseError } from './errors.ts'
import type { Tensor } from './tensor.ts'
import { emitOne, type Operand, TracedTensor } from './traced-tensor.ts'

// The operations of a forward that are not methods of TracedTensor, by torch.nn.functional's names.

/** `x @ weight.T (+ bias)`; x `[.., in]`, weight `[out, in]`, bias `[out]`. */
export function linear(x: TracedTensor, weight: Operand, bias?: Operand): TracedTensor {
  // The bias is its own operation, so that a partial product is summed over the ranks before it is added, once.
  const product = emitOne('linear', [x, weight])
  return bias === undefined ? product : product.add(bias)
}

/** Rows of `table [entries, width]` by int32 `ids`. */
export function embedding(ids: TracedTensor, table: Operand): TracedTensor {
  return emitOne('embedding', [ids, table])
}

/** Joins values along `dim`; negative dims count from the end. */
export function concat(tensors: readonly TracedTensor[], dim: number): TracedTensor {
  const rank = tensors[0]?.shape.length ?? 0
  return emitOne('concat', tensors, { dim: dim < 0 ? dim + rank : dim })
}

/** Layer norm over the last dimension. @throws RankwiseError `NORM_BIAS` for a bias without a weight */
export function layerNorm(
  x: TracedTensor,
  options: { readonly eps: number; readonly weight?: Operand | undefined; readonly bias?: Operand | undefined },
): TracedTensor {
  if (options.weight === undefined && options.bias !== undefined) {
    throw new RankwiseError('NORM_BIAS', 'a layer norm has a bias only together with a weight')
  }
  const weights = [options.weight, options.bias].filter((operand) => operand !== undefined)
  return emitOne('layer_norm', [x, ...weights], { eps: options.eps })
}

/** Root-mean-square norm over the last dimension. */
export function rmsNorm(x: TracedTensor, options: { readonly eps: number; readonly weight?: Operand }): TracedTensor {
  return emitOne('rms_norm', options.weight === undefined ? [x] : [x, options.weight], { eps: options.eps })
}

/** Group norm of x `[batch, channels, height, width]`. */
export function groupNorm(
  x: TracedTensor,
  options: { readonly groups: number; readonly eps: number; readonly weight: Operand; readonly bias: Operand },
): TracedTensor {
  return emitOne('group_norm', [x, options.weight, options.bias], { groups: options.groups, eps: options.eps })
}

/**
 * Scaled dot-product attention of q `[batch, queries, heads, headDim]` and k, v `[batch, keys, kvHeads, headDim]`.
 *
 * @param options.bias - `[batch or 1, 1, queries, keys]`, added to the scores; -Infinity masks a key
 * @param options.causal - query i sees keys 0..i only. @default false
 * @param options.scale - @default 1 / sqrt(headDim)
 */
export function attention(
  q: TracedTensor,
  k: TracedTensor,
  v: TracedTensor,
  options: { readonly bias?: TracedTensor; readonly causal?: boolean; readonly scale?: number } = {},
): TracedTensor {
  const { bias, causal = false, scale = 1 / Math.sqrt(q.size(3)) } = options
  return emitOne('attention', bias === undefined ? [q, k, v] : [q, k, v, bias], { scale, causal })
}

/**
 * Rotary position embedding of x `[batch, tokens, heads, headDim]`; cos and sin are `[tokens, headDim / 2]`.
 *
 * @param options.interleaved - rotate the pairs (2i, 2i + 1) instead of (i, i + headDim / 2)
 */
export function rope(
  x: TracedTensor,
  cos: TracedTensor,
  sin: TracedTensor,
  options: { readonly interleaved: boolean },
): TracedTensor {
  return emitOne('rope', [x, cos, sin], { interleaved: options.interleaved })
}

/** 2-d convolution of x `[batch, in, height, width]` by weight `[out, in, kh, kw]`. */
export function conv2d(
  x: TracedTensor,
  weight: Operand,
  bias: Operand,
  options: {
    readonly stride: number
    readonly padding: readonly [top: number, bottom: number, left: number, right: number]
  },
): TracedTensor {
  return emitOne('conv2d', [x, weight, bias], { stride: options.stride, padding: options.padding })
}

/** Repeats pixels of x `[batch, channels, height, width]` in both directions. */
export function upsampleNearest2d(x: TracedTensor, scale: number): TracedTensor {
  return emitOne('upsample_nearest2d', [x], { scale })
}

/** A constant that is part of the model's code, such as a table of frequencies. */
export function constant(data: Tensor): TracedTensor {
  return new TracedTensor(activeTrace().constant(data))
}
