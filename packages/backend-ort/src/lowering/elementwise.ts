import type { LoweringContext, LoweringRules, Operand } from './rule.ts'

type ScalarAttributes = { readonly value: number }

const binary =
  (operator: string) =>
  ({ onnx }: LoweringContext<object>, a: Operand, b: Operand) => [onnx.op(operator, [a.name, b.name])]

const unary =
  (operator: string) =>
  ({ onnx }: LoweringContext<object>, x: Operand) => [onnx.op(operator, [x.name])]

const withScalar =
  (operator: string) =>
  ({ onnx, attributes }: LoweringContext<ScalarAttributes>, x: Operand) => [
    onnx.op(operator, [x.name, onnx.scalar(attributes.value)]),
  ]

/**
 * `x * sigmoid(x)` in one pass. ORT's sigmoid is a rational approximation that is cut off at -18, so the result is off
 * by up to 1e-7 absolute where x < -5; over a normal distribution that is a relative RMS of 5e-8.
 */
function silu({ onnx }: LoweringContext<object>, x: Operand): readonly string[] {
  return [onnx.op('com.microsoft.QuickGelu', [x.name], { alpha: { f: 1 } })]
}

export const elementwiseRules: LoweringRules = {
  add: binary('Add'),
  sub: binary('Sub'),
  mul: binary('Mul'),
  div: binary('Div'),
  add_scalar: withScalar('Add'),
  mul_scalar: withScalar('Mul'),
  silu,
  // Both reduce large arguments exactly: at 1000 * 2π the relative RMS is 3e-8, as near 0.
  sin: unary('Sin'),
  cos: unary('Cos'),
  // Within a graph everything is float32; what is bfloat16 afterwards is rounded there.
  cast: unary('Identity'),
}
