import { OP_CASES, type OpCase } from '@rankwise/conformance'
import { beforeAll, describe, expect, it } from 'vitest'
import type { Engine } from '../src/engine.ts'
import type { Operand, Rule, RuleContext } from '../src/lowering/rule.ts'
import { RULES } from '../src/lowering/rules.ts'
import { engineOf } from './engines.ts'
import { casesFor, checkOp } from './support.ts'

type Change = { readonly attributes?: object; readonly inputs?: (inputs: Operand[]) => Operand[] }

/** The rule of an operation, applied to other attributes or operands than it was given. */
function changed(op: string, change: (attributes: Record<string, never>) => Change): Rule {
  const rule = RULES[op] as Rule
  return (context: RuleContext<never>, ...inputs: Operand[]) => {
    const { attributes = context.attributes, inputs: changeInputs } = change(context.attributes)
    return rule({ ...context, attributes: attributes as never }, ...(changeInputs?.(inputs) ?? inputs))
  }
}

const instead = (op: string) => RULES[op] as Rule
const swapped = (op: string) =>
  changed(op, () => ({ inputs: ([a, b, ...rest]) => [b as Operand, a as Operand, ...rest] }))
const without = (op: string, index: number) =>
  changed(op, () => ({ inputs: (inputs) => inputs.filter((_, i) => i !== index) }))
const reordered = (op: string, order: readonly number[]) =>
  changed(op, () => ({ inputs: (inputs) => order.flatMap((i) => inputs[i] ?? []) }))

/** A rule that is right but for the last bits of mantissa of its result. */
const rounded = (op: string): Rule => {
  const rule = RULES[op] as Rule
  return (context: RuleContext<never>, ...inputs: Operand[]) => {
    const { engine } = context
    return rule(context, ...inputs).map((ref) => engine.binary('mul', ref, engine.scalar(1 + 2 ** -17)))
  }
}

/** Deliberately wrong rules; each computes something, of the right shape in at least one case. */
const MUTANTS: readonly (readonly [op: string, what: string, rule: Rule])[] = [
  ['add', 'subtracts', instead('sub')],
  ['sub', 'the other way round', swapped('sub')],
  ['mul', 'divides', instead('div')],
  ['div', 'the other way round', swapped('div')],
  ['add_scalar', 'multiplies', instead('mul_scalar')],
  ['mul_scalar', 'adds', instead('add_scalar')],
  ['silu', 'without x', ({ engine }, x: Operand) => [engine.unary('sigmoid', x.ref)]],
  ['sin', 'is cos', instead('cos')],
  ['cos', 'is sin', instead('sin')],
  ['cast', 'adds', ({ engine }, x: Operand) => [engine.binary('add', x.ref, engine.scalar(1))]],
  [
    'linear',
    'with the weight transposed',
    changed('linear', () => ({
      inputs: ([x, weight]) => [
        x as Operand,
        { ...(weight as Operand), stored: { ref: (weight as Operand).ref, order: [1, 0] } },
      ],
    })),
  ],
  ['linear', 'rounded to 17 bits', rounded('linear')],
  [
    'embedding',
    'one row further',
    ({ engine, outputs }, ids: Operand, table: Operand) => {
      const rows = [...(engine.read(ids.ref) as Int32Array)].map((id) => (id + 1) % (table.shape[0] as number))
      const next = engine.write('int32', ids.shape, Int32Array.from(rows))
      return instead('embedding')({ engine, attributes: {} as never, outputs }, { ...ids, ref: next }, table)
    },
  ],
  [
    'reshape',
    'in column order',
    ({ engine, outputs }, x: Operand) => {
      const permutation = x.shape.map((_, i) => x.shape.length - 1 - i)
      return [engine.reshape(engine.transpose(x.ref, permutation), outputs[0]?.shape ?? [])]
    },
  ],
  [
    'transpose',
    'by the inverse permutation',
    changed('transpose', ({ permutation }) => {
      const from = permutation as unknown as readonly number[]
      return { attributes: { permutation: from.map((_, i) => from.indexOf(i)) } }
    }),
  ],
  ['split', 'in another order', (context: RuleContext<never>, x: Operand) => instead('split')(context, x).toReversed()],
  ['concat', 'in another order', changed('concat', () => ({ inputs: (inputs) => inputs.toReversed() }))],
  ['layer_norm', 'with another eps', changed('layer_norm', () => ({ attributes: { eps: 2e-6 } }))],
  ['layer_norm', 'without the bias', without('layer_norm', 2)],
  ['layer_norm', 'without centring', instead('rms_norm')],
  ['rms_norm', 'with centring', instead('layer_norm')],
  ['rms_norm', 'with another eps', changed('rms_norm', () => ({ attributes: { eps: 2e-6 } }))],
  ['rms_norm', 'without the weight', without('rms_norm', 1)],
  ['group_norm', 'in one group', changed('group_norm', ({ eps }) => ({ attributes: { eps, groups: 1 } }))],
  ['group_norm', 'with weight and bias swapped', reordered('group_norm', [0, 2, 1])],
  [
    'attention',
    'with the default scale',
    changed('attention', (attributes) => ({ attributes: { ...attributes, scale: 0.5 } })),
  ],
  [
    'attention',
    'seeing the future',
    changed('attention', (attributes) => ({ attributes: { ...attributes, causal: false } })),
  ],
  ['attention', 'without the bias', without('attention', 3)],
  ['attention', 'with keys and values swapped', reordered('attention', [0, 2, 1, 3])],
  [
    'rope',
    'in the other layout',
    changed('rope', ({ interleaved }) => ({ attributes: { interleaved: !interleaved } })),
  ],
  ['rope', 'with cos and sin swapped', reordered('rope', [0, 2, 1])],
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
    'by repeating the picture',
    ({ engine, attributes }, x: Operand) => {
      const { scale } = attributes as { scale: number }
      return [engine.tile(x.ref, [1, 1, scale, scale])]
    },
  ],
]

describe('a wrong rule is noticed by its values', () => {
  let engine: Engine
  beforeAll(async () => {
    engine = await engineOf('wasm')
  })

  it.each(MUTANTS)('%s %s', async (op, _what, rule) => {
    const rules = { ...RULES, [op]: rule }
    const outcomes = []
    // One after the other: each counts the tensors of the engine.
    for (const known of casesFor(engine).filter((opCase) => opCase.op === op)) {
      outcomes.push(await checkOp(engine, known, { rules }).then(() => '', String))
    }
    expect(outcomes.join('\n')).toContain('values are not close')
  })

  it('has a mutant of every operation', () => {
    const mutated = new Set(MUTANTS.map(([op]) => op))
    expect([...new Set(OP_CASES.map(({ op }) => op))].filter((op) => !mutated.has(op))).toEqual([])
  })

  it('a rule that leaves a tensor behind is noticed by the count', async () => {
    // Tensors of another engine on the same memory are unknown to the `tidy` that the rule runs in.
    const other = await engineOf('wasm')
    const leaking = ({ engine: own }: RuleContext<never>, x: Operand) => {
      other.unary('sin', x.ref)
      return [own.unary('sin', x.ref)]
    }
    const known = OP_CASES.find(({ op, inputs }) => op === 'sin' && inputs[0]?.data.length === 30) as OpCase
    await checkOp(engine, known)
    await expect(checkOp(engine, known, { rules: { ...RULES, sin: leaking } })).rejects.toThrow('expected')
  })
})
