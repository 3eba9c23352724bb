import { type ActiveTrace, withTrace } from './active-trace.ts'
import type { DType } from './dtype.ts'
import { RankwiseError } from './errors.ts'
import type { Attributes, Graph, Node, TensorType, Value } from './graph.ts'
import type { Module } from './module.ts'
import { opDefinition } from './op.ts'
import './ops/index.ts'
import { Parameter } from './parameter.ts'
import type { Tensor } from './tensor.ts'
import { TracedTensor } from './traced-tensor.ts'

/**
 * Records what `forward` does with arguments of the given types.
 *
 * @param name - how printed graphs call it
 * @param dtype - what the weights are computed in, whatever the checkpoint stores. @default 'float32'
 * @throws RankwiseError `OP_SHAPE` with the module path when operands do not go together, `TRACE_MODULE` and
 *   `TRACE_PARAMETER` when forward uses modules or weights that are not part of the model
 */
export function trace<I extends Readonly<Record<string, TensorType>>>(
  name: string,
  model: Module,
  inputs: I,
  forward: (inputs: { readonly [K in keyof I]: TracedTensor }) => Readonly<Record<string, TracedTensor>>,
  dtype: DType = 'float32',
): Graph {
  const tracer = new Tracer(model, dtype)
  const traced = Object.fromEntries(Object.entries(inputs).map(([key, type]) => [key, tracer.input(key, type)]))
  const outputs = withTrace(tracer, () => forward(traced as { [K in keyof I]: TracedTensor }))
  return tracer.finish(name, outputs)
}

/** Records the operations of a `forward` as a graph. */
class Tracer implements ActiveTrace {
  readonly #dtype: DType
  readonly #paths: ReadonlyMap<object, string>
  readonly #names: ReadonlyMap<Parameter, string>
  readonly #scopes: string[] = ['']
  readonly #values: Value[] = []
  readonly #parameters = new Map<Parameter, Value>()
  readonly #nodes: Node[] = []

  constructor(model: Module, dtype: DType) {
    this.#dtype = dtype
    // A module or weight that is used in two places has the name of the first, as in torch's state dict.
    this.#paths = new Map([...model.namedModules()].reverse().map(([path, module]) => [module, path]))
    this.#names = new Map([...model.namedParameters()].map(([name, parameter]) => [parameter, name]))
  }

  input(name: string, type: TensorType): TracedTensor {
    return new TracedTensor(this.#value({ dtype: type.dtype, shape: type.shape, kind: 'input', name }))
  }

  constant(data: Tensor): Value {
    return this.#value({ dtype: data.dtype, shape: data.shape, kind: 'constant', data })
  }

  emit(op: string, operands: readonly (Value | Parameter)[], attributes: Attributes): readonly Value[] {
    const inputs = operands.map((operand) => (operand instanceof Parameter ? this.#parameter(operand) : operand))
    const path = this.#scopes.at(-1) ?? ''
    // Field by field: a rule may return its operand, which has an id, a name and data of its own.
    const outputs = inferTypes(op, inputs, attributes, path).map(({ dtype, shape }) =>
      this.#value({ dtype, shape, kind: 'result' }),
    )
    this.#nodes.push({ op, inputs, attributes, outputs, path })
    return outputs
  }

  within<T>(module: object, body: () => T): T {
    const path = this.#paths.get(module)
    if (path === undefined) {
      throw new RankwiseError('TRACE_MODULE', `a ${module.constructor.name} outside the traced model was called`, {
        rule: 'modules that forward calls are properties of the model',
      })
    }
    this.#scopes.push(path)
    try {
      return body()
    } finally {
      this.#scopes.pop()
    }
  }

  finish(name: string, outputs: Readonly<Record<string, TracedTensor>>): Graph {
    const results = Object.values(outputs).map(({ value }) => value)
    const nodes = usedNodes(this.#nodes, results)
    const used = new Set([...results, ...nodes.flatMap(({ inputs }) => inputs)])
    const of = (kind: Value['kind']) => this.#values.filter((value) => value.kind === kind)
    return {
      name,
      inputs: of('input'),
      parameters: of('parameter').filter((value) => used.has(value)),
      constants: of('constant').filter((value) => used.has(value)),
      nodes,
      outputs: Object.fromEntries(Object.entries(outputs).map(([key, { value }]) => [key, value])),
    }
  }

  #parameter(parameter: Parameter): Value {
    const known = this.#parameters.get(parameter)
    if (known !== undefined) return known
    const name = this.#names.get(parameter)
    if (name === undefined) {
      throw new RankwiseError('TRACE_PARAMETER', 'a parameter outside the traced model was used', {
        where: this.#scopes.at(-1) || '(model)',
        actual: { shape: parameter.shape },
        rule: 'parameters are properties of modules that are properties of the model',
      })
    }
    const value = this.#value({ dtype: this.#dtype, shape: parameter.shape, kind: 'parameter', name })
    this.#parameters.set(parameter, value)
    return value
  }

  #value(value: Omit<Value, 'id'>): Value {
    const complete = { id: this.#values.length, ...value }
    this.#values.push(complete)
    return complete
  }
}

/** Drops operations whose results nobody reads; they would be computed, and their partial sums exchanged. */
function usedNodes(nodes: readonly Node[], results: readonly Value[]): readonly Node[] {
  const used = new Set(results)
  const kept: Node[] = []
  for (const node of [...nodes].reverse()) {
    if (!node.outputs.some((output) => used.has(output))) continue
    for (const input of node.inputs) used.add(input)
    kept.push(node)
  }
  return kept.reverse()
}

function inferTypes(op: string, inputs: readonly Value[], attributes: Attributes, path: string): readonly TensorType[] {
  try {
    return opDefinition(op).infer(inputs, attributes)
  } catch (error) {
    if (!(error instanceof RankwiseError) || error.where !== undefined) throw error
    throw new RankwiseError(error.code, `${op} cannot take these operands`, {
      where: path || '(model)',
      actual: error.actual,
      ...(error.rule === undefined ? {} : { rule: error.rule }),
    })
  }
}
