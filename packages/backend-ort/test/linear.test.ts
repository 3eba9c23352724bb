import { segmentOf } from '@rankwise/conformance'
import { concat, Linear, Module, type TensorType, type TracedTensor, trace } from '@rankwise/core'
import { describe, expect, it } from 'vitest'
import { lowerSegment } from '../src/lowering/lower-segment.ts'
import type { OnnxModel } from '../src/onnx/model.ts'
import type { GraphTarget } from '../src/onnx/onnx-builder.ts'
import type { WeightStorage } from '../src/weight-storage.ts'

const WIDTH = 1024
const X: TensorType = { dtype: 'float32', shape: [2, WIDTH] }
const CAPI: GraphTarget = { halfInputs: 'floats', hasLinear: true }

/** Three projections of one size, packed, of which the first is joined with the product of the others. */
class Packed extends Module {
  readonly qkv = new Linear(WIDTH, 3 * WIDTH, { bias: false })

  override forward(x: TracedTensor): TracedTensor {
    const [q, k, v] = this.qkv.call(x).chunk(3, -1) as [TracedTensor, TracedTensor, TracedTensor]
    return q.add(k.mul(v))
  }
}

/** A gated MLP whose input goes beside it into the last projection. */
class Gated extends Module {
  readonly linear_in = new Linear(WIDTH, 4 * WIDTH, { bias: false })
  readonly linear_out = new Linear(3 * WIDTH, WIDTH, { bias: false })

  override forward(x: TracedTensor): TracedTensor {
    const [gate, up] = this.linear_in.call(x).chunk(2, -1) as [TracedTensor, TracedTensor]
    return this.linear_out.call(concat([x, gate.silu().mul(up)], -1))
  }
}

function lowered(storage: WeightStorage, target: GraphTarget): OnnxModel {
  return lower(new Packed(), [storage], target)
}

function lower(
  model: Packed | Gated,
  storages: readonly WeightStorage[],
  target: GraphTarget,
  dtype: 'float32' | 'bfloat16' = 'float32',
): OnnxModel {
  const inputs = { x: { ...X, dtype } }
  const segment = segmentOf(trace('projection', model, inputs, ({ x }) => ({ y: model.call(x) }), dtype))
  return lowerSegment(segment, storages, { target }).model
}

const operatorsOf = ({ nodes }: OnnxModel) =>
  nodes.map(({ domain, opType }) => (domain === '' ? opType : `${domain}.${opType}`))

describe('a projection by a weight in bfloat16', () => {
  it('reads it as it is, in parts that are split without a copy', () => {
    const model = lowered({ dtype: 'bfloat16', pieces: [3 * WIDTH] }, CAPI)
    expect(operatorsOf(model)).toEqual(['rankwise.Linear', 'rankwise.Linear', 'rankwise.Linear', 'Mul', 'Add'])
    expect(model.inputs.map(({ dtype, shape }) => [dtype, shape])).toEqual([
      ['float32', [2, WIDTH]],
      ['bfloat16', [WIDTH, WIDTH]],
      ['bfloat16', [WIDTH, WIDTH]],
      ['bfloat16', [WIDTH, WIDTH]],
    ])
    expect(model.values.map(({ shape }) => shape)).toEqual([
      [2, WIDTH],
      [2, WIDTH],
      [2, WIDTH],
    ])
  })

  it('takes its input in parts, which what is between projections leaves as they are', () => {
    const storages = [4 * WIDTH, WIDTH].map((rows): WeightStorage => ({ dtype: 'bfloat16', pieces: [rows] }))
    const model = lower(new Gated(), storages, CAPI)
    const between = ['com.microsoft.QuickGelu', 'com.microsoft.QuickGelu', 'Mul', 'Mul']
    expect(operatorsOf(model)).toEqual([...Array(4).fill('rankwise.Linear'), ...between, 'rankwise.Linear'])
    expect(model.nodes.at(-1)?.inputs).toHaveLength(4)
  })

  it('rounds what is computed in bfloat16 as it multiplies', () => {
    const storages = [4 * WIDTH, WIDTH].map((rows): WeightStorage => ({ dtype: 'bfloat16', pieces: [rows] }))
    const model = lower(new Gated(), storages, CAPI, 'bfloat16')
    const isRounded = new Map(model.nodes.map((node) => [node.outputs[0], node.opType === 'RoundedLinear']))
    expect(operatorsOf(model).filter((name) => name.startsWith('rankwise'))).toEqual(
      Array(5).fill('rankwise.RoundedLinear'),
    )
    const gate = model.nodes.filter(({ opType }) => opType === 'QuickGelu')
    expect(gate.map(({ inputs: [x] }) => isRounded.get(x as string))).toEqual([true, true])
  })

  it('takes short pieces one by one', () => {
    const model = lowered({ dtype: 'bfloat16', pieces: [WIDTH, 100, 2 * WIDTH - 100] }, CAPI)
    // What is longer than the weight is wide is cut evenly.
    expect(model.inputs.slice(1).map(({ shape }) => shape[0])).toEqual([WIDTH, 100, 976, 972])
  })

  it.each<{ what: string; storage: WeightStorage; target: GraphTarget; dtype: string }>([
    {
      what: 'where that is float16',
      storage: { dtype: 'float16', pieces: [3 * WIDTH] },
      target: CAPI,
      dtype: 'float16',
    },
    {
      what: 'on an engine without the operator',
      storage: { dtype: 'bfloat16', pieces: [3 * WIDTH] },
      target: { halfInputs: 'floats', hasLinear: false },
      dtype: 'bfloat16',
    },
    {
      what: 'on the Node.js binding',
      storage: { dtype: 'bfloat16', pieces: [3 * WIDTH] },
      target: { halfInputs: 'bits', hasLinear: false },
      dtype: 'uint16',
    },
  ])('casts it first $what', ({ storage, target, dtype }) => {
    const model = lowered(storage, target)
    expect(operatorsOf(model)).toContain('Cast')
    expect(operatorsOf(model).includes('BitCast')).toBe(dtype === 'uint16')
    expect(operatorsOf(model)).not.toContain('rankwise.Linear')
    expect(new Set(model.inputs.slice(1).map((input) => input.dtype))).toEqual(new Set([dtype]))
  })
})
