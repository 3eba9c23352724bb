import { sameShape } from '@rankwise/core'
import type { Lowered, LoweringContext, LoweringRules, Operand } from './rule.ts'

type ScalarAttributes = { readonly value: number }

/** Elements of a result depend on those of the operands at their place: what lies in equal parts need not be joined. */
function partwise(operands: readonly Operand[], compute: (names: readonly string[]) => string): Lowered {
  const [first, ...others] = operands as [Operand, ...Operand[]]
  const { dim, parts } = first.parts
  const areAlike = others.every(({ shape, parts: other }) => {
    const isCutAlike = other.dim === dim && other.parts.length === parts.length
    return isCutAlike && sameShape(shape, first.shape) && other.parts.every(({ size }, i) => size === parts[i]?.size)
  })
  if (parts.length === 1 || !areAlike) return compute(operands.map(({ name }) => name))
  const namesOf = (i: number) => operands.map((operand) => operand.parts.parts[i]?.name as string)
  return { dim, parts: parts.map(({ size }, i) => ({ name: compute(namesOf(i)), size })) }
}

const binary =
  (operator: string) =>
  ({ onnx }: LoweringContext<object>, a: Operand, b: Operand) => [partwise([a, b], (names) => onnx.op(operator, names))]

const unary =
  (operator: string) =>
  ({ onnx }: LoweringContext<object>, x: Operand) => [partwise([x], (names) => onnx.op(operator, names))]

const withScalar =
  (operator: string) =>
  ({ onnx, attributes }: LoweringContext<ScalarAttributes>, x: Operand) => [
    partwise([x], (names) => onnx.op(operator, [...names, onnx.scalar(attributes.value)])),
  ]

/**
 * `x * sigmoid(x)` in one pass. ORT's sigmoid is a rational approximation that is cut off at -18, so the result is off
 * by up to 1e-7 absolute where x < -5; over a normal distribution that is a relative RMS of 5e-8.
 */
function silu({ onnx }: LoweringContext<object>, x: Operand): readonly Lowered[] {
  return [partwise([x], (names) => onnx.op('com.microsoft.QuickGelu', names, { alpha: { f: 1 } }))]
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
