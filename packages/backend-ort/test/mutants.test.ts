import { OP_CASES } from '@rankwise/conformance'
import { describe, expect, it } from 'vitest'
import { LOWERING_RULES } from '../src/lowering/lower-segment.ts'
import type { LoweringContext, LoweringRule, Operand } from '../src/lowering/rule.ts'
import { checkOp } from './support.ts'

type Change = { readonly attributes?: object; readonly inputs?: (inputs: Operand[]) => Operand[] }

/** The rule of an operation, applied to other attributes or operands than it was given. */
function changed(op: string, change: (attributes: Record<string, never>) => Change): LoweringRule {
  const rule = LOWERING_RULES[op] as LoweringRule
  return (context: LoweringContext<never>, ...inputs: Operand[]) => {
    const { attributes = context.attributes, inputs: changeInputs } = change(context.attributes)
    return rule({ ...context, attributes: attributes as never }, ...(changeInputs?.(inputs) ?? inputs))
  }
}

const instead = (op: string) => LOWERING_RULES[op] as LoweringRule
const swapped = (op: string) =>
  changed(op, () => ({ inputs: ([a, b, ...rest]) => [b as Operand, a as Operand, ...rest] }))
const without = (op: string, index: number) =>
  changed(op, () => ({ inputs: (inputs) => inputs.filter((_, i) => i !== index) }))

/** Deliberately wrong rules; each computes something, of the right shape in at least one case. */
const MUTANTS: readonly (readonly [op: string, what: string, rule: LoweringRule])[] = [
  ['add', 'subtracts', instead('sub')],
  ['sub', 'the other way round', swapped('sub')],
  ['mul', 'divides', instead('div')],
  ['div', 'the other way round', swapped('div')],
  ['add_scalar', 'multiplies', instead('mul_scalar')],
  ['mul_scalar', 'adds', instead('add_scalar')],
  [
    'silu',
    'with the alpha of QuickGELU',
    ({ onnx }, x: Operand) => [onnx.op('com.microsoft.QuickGelu', [x.name], { alpha: { f: 1.702 } })],
  ],
  ['sin', 'is cos', instead('cos')],
  ['cos', 'is sin', instead('sin')],
  ['cast', 'adds', ({ onnx }, x: Operand) => [onnx.op('Add', [x.name, onnx.scalar(1)])]],
  [
    'linear',
    'with the weight transposed',
    ({ onnx }, x: Operand, weight: Operand) => [onnx.op('MatMul', [x.name, weight.name])],
  ],
  [
    'embedding',
    'one row further',
    ({ onnx }, ids: Operand, table: Operand) => [
      onnx.op('Gather', [table.name, onnx.op('Sub', [ids.name, onnx.constant('int32', [], Int32Array.of(1))])]),
    ],
  ],
  [
    'reshape',
    'in column order',
    ({ onnx, outputs }, x: Operand) => [onnx.reshape(onnx.op('Transpose', [x.name]), outputs[0]?.shape ?? [])],
  ],
  [
    'transpose',
    'by the inverse permutation',
    changed('transpose', ({ permutation }) => {
      const from = permutation as unknown as readonly number[]
      return { attributes: { permutation: from.map((_, i) => from.indexOf(i)) } }
    }),
  ],
  [
    'split',
    'in another order',
    (context: LoweringContext<never>, x: Operand) => instead('split')(context, x).toReversed(),
  ],
  ['concat', 'in another order', changed('concat', () => ({ inputs: (inputs) => inputs.toReversed() }))],
  ['layer_norm', 'with another eps', changed('layer_norm', () => ({ attributes: { eps: 2e-6 } }))],
  ['layer_norm', 'without the bias', without('layer_norm', 2)],
  ['layer_norm', 'without centring', instead('rms_norm')],
  ['rms_norm', 'with centring', instead('layer_norm')],
  ['rms_norm', 'with another eps', changed('rms_norm', () => ({ attributes: { eps: 2e-6 } }))],
  ['rms_norm', 'without the weight', without('rms_norm', 1)],
  ['group_norm', 'in one group', changed('group_norm', ({ eps }) => ({ attributes: { eps, groups: 1 } }))],
  [
    'group_norm',
    'with weight and bias swapped',
    changed('group_norm', () => ({
      inputs: ([x, weight, bias]) => [x, bias, weight] as Operand[],
    })),
  ],
  [
    'attention',
    'with the default scale',
    changed('attention', (attributes) => ({
      attributes: { ...attributes, scale: 0.5 },
    })),
  ],
  [
    'attention',
    'seeing the future',
    changed('attention', (attributes) => ({
      attributes: { ...attributes, causal: false },
    })),
  ],
  ['attention', 'without the bias', without('attention', 3)],
  [
    'attention',
    'with keys and values swapped',
    changed('attention', () => ({
      inputs: ([q, k, v, ...bias]) => [q, v, k, ...bias] as Operand[],
    })),
  ],
  [
    'rope',
    'in the other layout',
    changed('rope', ({ interleaved }) => ({ attributes: { interleaved: !interleaved } })),
  ],
  [
    'rope',
    'with cos and sin swapped',
    changed('rope', () => ({
      inputs: ([x, cos, sin]) => [x, sin, cos] as Operand[],
    })),
  ],
  [
    'conv2d',
    'with rows and columns of the padding swapped',
    changed('conv2d', (attributes) => {
      const [top, bottom, left, right] = attributes.padding as unknown as number[]
      return { attributes: { ...attributes, padding: [left, right, top, bottom] } }
    }),
  ],
  [
    'conv2d',
    'with the padding on the other side',
    changed('conv2d', (attributes) => {
      const [top, bottom, left, right] = attributes.padding as unknown as number[]
      return { attributes: { ...attributes, padding: [bottom, top, right, left] } }
    }),
  ],
  [
    'upsample_nearest2d',
    'rounding up',
    ({ onnx, attributes }, x: Operand) => {
      const { scale } = attributes as { scale: number }
      const scales = onnx.constant('float32', [4], Float32Array.of(1, 1, scale, scale))
      const mode = { coordinate_transformation_mode: { s: 'asymmetric' }, nearest_mode: { s: 'ceil' } }
      return [onnx.op('Resize', [x.name, '', scales], { mode: { s: 'nearest' }, ...mode })]
    },
  ],
]

describe('a wrong lowering is noticed by its values', () => {
  it.each(MUTANTS)('%s %s', async (op, _what, rule) => {
    const rules = { ...LOWERING_RULES, [op]: rule }
    const cases = OP_CASES.filter((known) => known.op === op)
    const outcomes = await Promise.allSettled(cases.map((known) => checkOp(known, rules)))
    const messages = outcomes.flatMap((outcome) => (outcome.status === 'rejected' ? [String(outcome.reason)] : []))
    expect(messages.join('\n')).toContain('values are not close')
  })

  it('has a mutant of every operation', () => {
    const mutated = new Set(MUTANTS.map(([op]) => op))
    expect([...new Set(OP_CASES.map(({ op }) => op))].filter((op) => !mutated.has(op))).toEqual([])
  })
})
