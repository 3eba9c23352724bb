import type { OnnxBuilder } from '../onnx/onnx-builder.ts'
import { join, toFloat32 } from './operand.ts'
import type { LoweringContext, LoweringRules, Operand, Part, Parts } from './rule.ts'

/**
 * One GEMM over all rows of x for each tile of torch's `[out, in]` weight, which it reads as it lies. What the tiles give
 * are parts of the result along its last dimension.
 */
function linear({ onnx, outputs: [result] }: LoweringContext<object>, x: Operand, weight: Operand): readonly Parts[] {
  if (onnx.target.hasLinear && weight.storedDType === 'bfloat16') {
    return [multiplyStored(onnx, x, weight, result?.dtype === 'bfloat16')]
  }
  const multiply = (tile: string) => onnx.op('com.microsoft.FusedMatMul', [x.name, tile], { transB: { i: 1 } })
  const parts = weight.parts.parts.map(({ name, size }) => ({ name: multiply(name), size }))
  return [{ dim: x.shape.length - 1, parts }]
}

/**
 * Fewest rows of a weight that a product of its own is worth, as it copies its input. A weight with more rows than columns
 * is cut further where projections of one size are packed in it: what splits their results finds whole parts.
 */
const LEAST_CUT_ROWS = 1024

function multiplyStored(onnx: OnnxBuilder, x: Operand, weight: Operand, isRounded: boolean): Parts {
  const width = weight.shape[1] as number
  const tiles = weight.storedTiles?.(Math.max(width, LEAST_CUT_ROWS))
  const columns = x.parts.dim === x.shape.length - 1 ? x.parts.parts.map((part) => part.name) : [x.name]
  const multiply = ({ name, size }: Part): Part => {
    const result = onnx.op(isRounded ? 'rankwise.RoundedLinear' : 'rankwise.Linear', [name, ...columns])
    return { name: onnx.declare({ name: result, dtype: 'float32', shape: x.shape.with(-1, size) }), size }
  }
  return { dim: x.shape.length - 1, parts: tiles?.parts.map(multiply) ?? [], isRounded }
}

type EmbeddingAttributes = { readonly before?: number; readonly after?: number }

/** Rows are looked up before they are cast: a table has many more than a prompt has tokens. */
function embedding(
  { onnx, attributes: { before = 0, after = 0 } }: LoweringContext<EmbeddingAttributes>,
  ids: Operand,
  table: Operand,
): readonly string[] {
  const [entries] = table.shape as [number, number]
  // Gather counts negative ids from the end. Here they are errors, as every other id outside of the table.
  const isNegative = onnx.op('Less', [ids.name, onnx.constant('int32', [], Int32Array.of(0))])
  const outside = onnx.constant('int32', [], Int32Array.of(entries))
  const index = onnx.op('Where', [isNegative, outside, ids.name])
  const stored = table.stored ?? { ...table.parts, dtype: 'float32' }
  // Only a table beyond 4 GiB has several parts.
  const rows = onnx.op('Gather', [join(onnx, stored), index])
  const found = toFloat32(onnx, rows, stored.dtype)
  if (before === 0 && after === 0) return [found]
  const outer = ids.shape.map(() => 0)
  return [onnx.op('Pad', [found, onnx.integers([...outer, before, ...outer, after])])]
}

export const linearRules: LoweringRules = { linear, embedding }
