import type { LoweringContext, LoweringRules, Operand } from './rule.ts'

/** One GEMM over all rows of x, reading torch's `[out, in]` weight as it lies. */
function linear({ onnx }: LoweringContext<object>, x: Operand, weight: Operand): readonly string[] {
  return [onnx.op('com.microsoft.FusedMatMul', [x.name, weight.name], { transB: { i: 1 } })]
}

function embedding({ onnx }: LoweringContext<object>, ids: Operand, table: Operand): readonly string[] {
  const [entries] = table.shape as [number, number]
  // Gather counts negative ids from the end. Here they are errors, as every other id outside of the table.
  const isNegative = onnx.op('Less', [ids.name, onnx.constant('int32', [], Int32Array.of(0))])
  const outside = onnx.constant('int32', [], Int32Array.of(entries))
  return [onnx.op('Gather', [table.name, onnx.op('Where', [isNegative, outside, ids.name])])]
}

export const linearRules: LoweringRules = { linear, embedding }
