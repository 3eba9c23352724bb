import type { BinaryOp, UnaryOp } from '../engine.ts'
import type { Operand, RuleContext, Rules } from './rule.ts'

type ScalarAttributes = { readonly value: number }

const binary =
  (op: BinaryOp) =>
  ({ engine }: RuleContext<object>, a: Operand, b: Operand) => [engine.binary(op, a.ref, b.ref)]

const unary =
  (op: UnaryOp) =>
  ({ engine }: RuleContext<object>, x: Operand) => [engine.unary(op, x.ref)]

const withScalar =
  (op: BinaryOp) =>
  ({ engine, attributes }: RuleContext<ScalarAttributes>, x: Operand) => [
    engine.binary(op, x.ref, engine.scalar(attributes.value)),
  ]

const silu = ({ engine }: RuleContext<object>, x: Operand) => [
  engine.binary('mul', x.ref, engine.unary('sigmoid', x.ref)),
]

export const elementwiseRules: Rules = {
  add: binary('add'),
  sub: binary('sub'),
  mul: binary('mul'),
  div: binary('div'),
  add_scalar: withScalar('add'),
  mul_scalar: withScalar('mul'),
  silu,
  sin: unary('sin'),
  cos: unary('cos'),
  // Elements are float32 whatever the dtype; what is bfloat16 afterwards is rounded then.
  cast: (_context: RuleContext<object>, x: Operand) => [x.ref],
}
