import { describe, expect, it } from 'vitest'
import { concat, constant, embedding, layerNorm, linear, rmsNorm } from '../src/functional.ts'
import type { Graph, TensorType } from '../src/graph.ts'
import { Module, ModuleList } from '../src/module.ts'
import { Embedding } from '../src/nn/embedding.ts'
import { Linear } from '../src/nn/linear.ts'
import { RMSNorm } from '../src/nn/norm.ts'
import { Parameter } from '../src/parameter.ts'
import { runGraph } from '../src/reference/index.ts'
import { Tensor } from '../src/tensor.ts'
import type { TracedTensor } from '../src/traced-tensor.ts'
import { trace } from '../src/tracer.ts'
import { codeOf, distance, float64, randomTensor, refusalOf } from './support.ts'

/** A module whose forward is given. */
class Forward extends Module {
  readonly #body: (x: TracedTensor) => TracedTensor

  constructor(body: (x: TracedTensor) => TracedTensor) {
    super()
    this.#body = body
  }

  override forward(x: TracedTensor): TracedTensor {
    return this.#body(x)
  }
}

class Mlp extends Module {
  readonly up: Linear
  readonly down: Linear

  constructor(width: number, inner: number) {
    super()
    this.up = new Linear(width, inner)
    this.down = new Linear(inner, width, { bias: false })
  }

  override forward(x: TracedTensor): TracedTensor {
    return this.down.call(this.up.call(x).silu())
  }
}

class Model extends Module {
  readonly blocks: ModuleList<Mlp>
  readonly norm: RMSNorm

  constructor(blocks: readonly Mlp[]) {
    super()
    this.blocks = new ModuleList(blocks)
    this.norm = new RMSNorm(4, { eps: 1e-6 })
  }

  override forward(x: TracedTensor): TracedTensor {
    let y = x
    for (const block of this.blocks) y = block.call(y)
    return this.norm.call(y)
  }
}

const float = (...shape: number[]): TensorType => ({ dtype: 'float64', shape })

function traceOf(model: Module & { forward(x: TracedTensor): TracedTensor }, type = float(2, 4)): Graph {
  return trace('test', model, { x: type }, ({ x }) => ({ y: model.call(x) as TracedTensor }), 'float64')
}

/** The graph of a function of one input. */
function traceFunction(body: (x: TracedTensor) => TracedTensor, type = float(2, 4)): Graph {
  return traceOf(new Forward(body), type)
}

describe('trace', () => {
  const model = new Model([new Mlp(4, 8), new Mlp(4, 8)])
  const graph = traceOf(model)

  it('records operations in order, with the path of the module that emitted them', () => {
    expect(graph.nodes.map(({ op, path }) => `${path} ${op}`)).toEqual([
      ...[0, 1].flatMap((i) => [
        `blocks.${i}.up linear`,
        `blocks.${i}.up add`,
        `blocks.${i} silu`,
        `blocks.${i}.down linear`,
      ]),
      'norm rms_norm',
    ])
  })

  it('names parameters as the checkpoint does, each once', () => {
    expect(graph.parameters.map(({ name, shape }) => `${name} [${shape}]`)).toEqual([
      ...[0, 1].flatMap((i) => [
        `blocks.${i}.up.weight [8,4]`,
        `blocks.${i}.up.bias [8]`,
        `blocks.${i}.down.weight [4,8]`,
      ]),
      'norm.weight [4]',
    ])
    expect([...model.namedParameters()].map(([name]) => name)).toEqual(graph.parameters.map(({ name }) => name))
  })

  it('gives every value an id of its own, and results neither name nor data', () => {
    const results = graph.nodes.flatMap((node) => node.outputs)
    const values = [...graph.inputs, ...graph.parameters, ...graph.constants, ...results]
    expect(new Set(values.map(({ id }) => id)).size).toBe(values.length)
    for (const result of results) {
      expect(result.kind).toBe('result')
      expect(result).not.toHaveProperty('name')
      expect(result).not.toHaveProperty('data')
    }
  })

  it('does not hand on the data of a constant to results of the same type', () => {
    const withConstant = traceFunction((x) => x.add(constant(randomTensor([2, 4], 1)).silu()))
    expect(withConstant.nodes[0]?.outputs[0]).toEqual({ id: expect.any(Number), kind: 'result', ...float(2, 4) })
    expect(withConstant.constants).toHaveLength(1)
  })

  it('computes weights in the dtype that is asked for, float32 by default', () => {
    const halves = trace(
      'half',
      model,
      { x: { dtype: 'bfloat16', shape: [2, 4] } },
      ({ x }) => ({ y: model.call(x) }),
      'bfloat16',
    )
    expect(new Set(halves.parameters.map(({ dtype }) => dtype))).toEqual(new Set(['bfloat16']))
    const standard = trace('single', model, { x: { dtype: 'float32', shape: [2, 4] } }, ({ x }) => ({
      y: model.call(x),
    }))
    expect(standard.outputs.y).toMatchObject({ dtype: 'float32', shape: [2, 4] })
  })

  it('has the outputs under their names', () => {
    const two = trace('two', model, { x: float(2, 4) }, ({ x }) => ({ a: x, b: x.silu() }), 'float64')
    expect(two.outputs.a).toBe(two.inputs[0])
    expect(two.outputs.b).toBe(two.nodes[0]?.outputs[0])
  })

  it('can be nested, and is over when forward throws', () => {
    const inner = () => traceFunction((x) => x.silu())
    const outer = traceFunction((x) => {
      expect(inner().nodes).toHaveLength(1)
      return x.sin()
    })
    expect(outer.nodes.map(({ op }) => op)).toEqual(['sin'])
    expect(() =>
      traceFunction(() => {
        throw new Error('forward failed')
      }),
    ).toThrow('forward failed')
    expect(codeOf(() => model.call({} as TracedTensor))).toBe('TRACE_INACTIVE')
  })
})

describe('a module that is used more than once', () => {
  it('has one set of parameters when it is called twice', () => {
    const mlp = new Mlp(4, 8)
    const graph = traceOf(new Model([mlp, mlp]))
    expect(graph.parameters.map(({ name }) => name)).toEqual([
      'blocks.0.up.weight',
      'blocks.0.up.bias',
      'blocks.0.down.weight',
      'norm.weight',
    ])
    expect(graph.nodes.filter(({ op }) => op === 'linear')).toHaveLength(4)
  })

  it('goes by its first path, in operations and in parameters alike', () => {
    const mlp = new Mlp(4, 8)
    const graph = traceOf(new Model([mlp, mlp]))
    const linears = graph.nodes.filter(({ op }) => op === 'linear')
    for (const { path, inputs } of linears) expect(`${path}.weight`).toBe(inputs[1]?.name)
    expect(linears.map(({ path }) => path)).toEqual([0, 1].flatMap(() => ['blocks.0.up', 'blocks.0.down']))
  })
})

describe('errors of a trace', () => {
  it('carry the path of the module whose operands do not go together', () => {
    const error = refusalOf(() => traceOf(new Model([new Mlp(4, 8), new Mlp(5, 8)])))
    expect(error.code).toBe('OP_SHAPE')
    expect(error.where).toBe('blocks.1.up')
    expect(error.message).toContain('linear')
    expect(error.message).toContain('[2, 4]')
    expect(error.message).toContain('[8, 5]')
    expect(error.rule).toContain('weight [out, in]')
  })

  it.each<[title: string, body: (x: TracedTensor) => TracedTensor]>([
    ['reshape', (x) => x.reshape([3, 3])],
    ['unflatten', (x) => x.unflatten(-1, [3, 2])],
    ['chunk', (x) => x.chunk(3, -1)[0] as TracedTensor],
    ['split', (x) => x.split([1, 2], 1)[0] as TracedTensor],
    ['slice past the end', (x) => x.slice(1, 0, 5)],
    ['slice from behind', (x) => x.slice(1, -1)],
    ['slice backwards', (x) => x.slice(1, 3, 2)],
    ['slice of a missing dimension', (x) => x.slice(2, 0, 1)],
    ['add', (x) => x.add(x.reshape([4, 2]))],
    ['concat', (x) => concat([x, x.reshape([4, 2])], 0)],
    ['concat along a missing dimension', (x) => concat([x, x], 2)],
    ['concat of nothing', () => concat([], 0)],
  ])('%s: carry the path of the module', (_title, body) => {
    class Outer extends Module {
      readonly inner = new Forward(body)

      override forward(x: TracedTensor): TracedTensor {
        return this.inner.call(x)
      }
    }
    const error = refusalOf(() => traceOf(new Outer()))
    expect(error).toMatchObject({ code: 'OP_SHAPE', where: 'inner' })
    expect(error.rule).toBeTruthy()
  })

  it('name the model itself where no module was called', () => {
    const model = new Mlp(4, 8)
    const error = refusalOf(() => trace('t', model, { x: float(2, 4) }, ({ x }) => ({ y: x.reshape([9]) })))
    expect(error.where).toBe('(model)')
  })

  it('refuse a parameter of another model', () => {
    const foreign = new Parameter([8, 4])
    const error = refusalOf(() => traceFunction((x) => linear(x, foreign)))
    expect(error.code).toBe('TRACE_PARAMETER')
    expect(error.message).toContain('[8, 4]')
  })

  it('refuse a module of another model', () => {
    const foreign = new Mlp(4, 8)
    const error = refusalOf(() => traceFunction((x) => foreign.call(x)))
    expect(error.code).toBe('TRACE_MODULE')
    expect(error.message).toContain('Mlp')
  })

  it('refuse a forward outside of a trace', () => {
    expect(codeOf(() => new Mlp(4, 8).call({} as TracedTensor))).toBe('TRACE_INACTIVE')
    const kept: TracedTensor[] = []
    traceFunction((x) => {
      kept.push(x)
      return x
    })
    expect(codeOf(() => kept[0]?.silu())).toBe('TRACE_INACTIVE')
  })

  it('refuse to run a ModuleList', () => {
    const list = new ModuleList([new Mlp(4, 8)])
    expect(codeOf(() => list.forward())).toBe('MODULE_LIST_FORWARD')
    expect(codeOf(() => list.at(1))).toBe('MODULE_NOT_FOUND')
  })

  it('refuse a layer norm with a bias and no weight', () => {
    const bias = new Parameter([4])
    expect(codeOf(() => traceFunction((x) => layerNorm(x, { eps: 0, bias })))).toBe('NORM_BIAS')
  })
})

describe('methods of a traced tensor', () => {
  const x = randomTensor([2, 3, 4], 1)
  const type = float(2, 3, 4)

  function run(body: (x: TracedTensor) => TracedTensor): Tensor {
    const { y } = runGraph(traceFunction(body, type), {}, { x })
    return y as Tensor
  }

  it.each<[title: string, body: (x: TracedTensor) => TracedTensor, shape: number[]]>([
    ['flatten', (t) => t.flatten(1, -1), [2, 12]],
    ['flatten of one dimension', (t) => t.flatten(1, 1), [2, 3, 4]],
    ['unflatten', (t) => t.unflatten(-1, [2, 2]), [2, 3, 2, 2]],
    ['unsqueeze in front', (t) => t.unsqueeze(0), [1, 2, 3, 4]],
    ['unsqueeze at the end', (t) => t.unsqueeze(-1), [2, 3, 4, 1]],
    ['unsqueeze before the last', (t) => t.unsqueeze(-2), [2, 3, 1, 4]],
    ['transpose', (t) => t.transpose([1, 2, 0]), [3, 4, 2]],
    ['slice', (t) => t.slice(1, 1), [2, 2, 4]],
    ['slice of nothing', (t) => t.slice(1, 3), [2, 0, 4]],
    ['chunk', (t) => t.chunk(2, -1)[1] as TracedTensor, [2, 3, 2]],
  ])('%s', (_title, body, shape) => {
    expect(traceFunction(body, type).outputs.y?.shape).toEqual(shape)
  })

  it('slices the elements it says', () => {
    const row = (i: number, j: number) => [...x.data.slice(12 * i + 4 * j, 12 * i + 4 * j + 4)]
    expect([...run((t) => t.slice(1, 0, 1)).data]).toEqual([...row(0, 0), ...row(1, 0)])
    expect([...run((t) => t.slice(1, 1, 2)).data]).toEqual([...row(0, 1), ...row(1, 1)])
    expect([...run((t) => t.slice(1, 2)).data]).toEqual([...row(0, 2), ...row(1, 2)])
    expect([...run((t) => t.slice(-2, 0)).data]).toEqual([...x.data])
  })

  it('computes with numbers and tensors', () => {
    const double = run((t) => t.add(t).mul(2).sub(t.mul(t)).div(t).add(1))
    const expected = float64(
      [2, 3, 4],
      Array.from(x.data, (value) => (4 * value - value * value) / value + 1),
    )
    expect(distance(double, expected)).toBeLessThan(1e-14)
  })

  it('knows sizes from the end', () => {
    traceFunction((t) => {
      expect([t.size(0), t.size(-1), t.dtype]).toEqual([2, 4, 'float64'])
      return t
    }, type)
  })
})

it('looks up embeddings by int32 ids', () => {
  class Text extends Module {
    readonly embed_tokens = new Embedding(5, 3)

    override forward(ids: TracedTensor): TracedTensor {
      return this.embed_tokens.call(ids)
    }
  }
  const model = new Text()
  const graph = trace('text', model, { ids: { dtype: 'int32', shape: [1, 2] } }, ({ ids }) => ({ y: model.call(ids) }))
  const table = randomTensor([5, 3], 2)
  const { y } = runGraph(graph, { 'embed_tokens.weight': table }, { ids: Tensor.int32([1, 2], [4, 0]) })
  expect([...(y as Tensor).data]).toEqual([...table.data.slice(12), ...table.data.slice(0, 3)])
  expect(codeOf(() => traceFunction((x) => embedding(x, x)))).toBe('OP_SHAPE')
})

it('norms take a weight or none', () => {
  const graph = traceFunction((x) => rmsNorm(layerNorm(x, { eps: 1e-6 }), { eps: 1e-6 }))
  expect(graph.nodes.map(({ op, inputs }) => `${op} ${inputs.length}`)).toEqual(['layer_norm 1', 'rms_norm 1'])
})

describe('Module', () => {
  const model = new Model([new Mlp(4, 8)])

  it('finds modules by path', () => {
    expect(model.getSubmodule('blocks.0.up')).toBe(model.blocks.at(0).up)
    expect(model.getSubmodule('')).toBe(model)
    const error = refusalOf(() => model.getSubmodule('blocks.0.across'))
    expect(error).toMatchObject({
      code: 'MODULE_NOT_FOUND',
      where: 'blocks.0.across',
      actual: { known: ['up', 'down'] },
    })
  })

  it('lists modules in the order of construction', () => {
    expect([...model.namedModules()].map(([path]) => path)).toEqual([
      '',
      'blocks',
      'blocks.0',
      'blocks.0.up',
      'blocks.0.down',
      'norm',
    ])
  })
})
