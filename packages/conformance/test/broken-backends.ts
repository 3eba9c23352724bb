import {
  type Backend,
  type Capabilities,
  type DeviceTensor,
  type Executable,
  type HostValues,
  type LoadShardOptions,
  type MemoryReport,
  type Node,
  type Segment,
  type ShardSource,
  Tensor,
} from '@rankwise/core'
import { ReferenceBackend } from '@rankwise/core/reference'

/** What these mutants declare. */
export const NARROW: Capabilities = { dtypes: ['float32', 'float64'] }

/** A backend that is right, but for what a mutant changes. */
export type Create = () => Backend

/** What most mutants are made from: what they get wrong does not depend on the dtype. */
class NarrowBackend extends ReferenceBackend {
  override readonly supports: Capabilities = NARROW
}

/** Changes the operations of a segment before they are computed. */
function rewriting(change: (node: Node) => Node | readonly Node[]): Create {
  class Rewriting extends NarrowBackend {
    protected override runSegment(segment: Segment, values: HostValues): readonly Tensor[] {
      return super.runSegment({ ...segment, nodes: segment.nodes.flatMap(change) }, values)
    }
  }
  return () => new Rewriting()
}

/** Changes one kind of operation. */
const instead = (op: string, change: (node: Node) => Node | readonly Node[]) =>
  rewriting((node) => (node.op === op ? change(node) : node))
const renamed = (op: string, other: string) => instead(op, (node) => ({ ...node, op: other }))
const attributed = (op: string, change: (attributes: Record<string, never>) => object) =>
  instead(op, (node) => ({ ...node, attributes: { ...node.attributes, ...change(node.attributes as never) } }))
const rearranged = (op: string, change: (inputs: readonly Node['inputs'][number][]) => readonly unknown[]) =>
  instead(op, (node) => ({ ...node, inputs: change(node.inputs) as Node['inputs'] }))
const sameShapes = (inputs: Node['inputs']) => inputs.every(({ shape }) => shape.join() === inputs[0]?.shape.join())
const numbers = (attribute: unknown) => attribute as readonly number[]

/** Puts a transpose of the weight before a product by a square one. */
function transposedWeight(node: Node): readonly Node[] {
  const [x, weight] = node.inputs as [Node['inputs'][0], Node['inputs'][0]]
  if (weight.shape[0] !== weight.shape[1]) return [node]
  const turned = { ...weight, id: -1 }
  const transpose = {
    op: 'transpose',
    inputs: [weight],
    attributes: { permutation: [1, 0] },
    outputs: [turned],
    path: '',
  }
  return [transpose, { ...node, inputs: [x, turned] }]
}

/** Elements of what is computed, changed afterwards. */
function results(change: (tensor: Tensor, segment: Segment) => Tensor): Create {
  class Changed extends NarrowBackend {
    protected override runSegment(segment: Segment, values: HostValues): readonly Tensor[] {
      return super.runSegment(segment, values).map((tensor) => change(tensor, segment))
    }
  }
  return () => new Changed()
}

const mapped = (tensor: Tensor, f: (value: number, i: number) => number) =>
  new Tensor('float64', tensor.shape, tensor.cast('float64').data.map(f)).cast(tensor.dtype)

/** Computes on other operands than were given. */
function operands(change: (tensor: Tensor, segment: Segment) => Tensor): Create {
  class Changed extends NarrowBackend {
    protected override runSegment(segment: Segment, values: HostValues): readonly Tensor[] {
      return super.runSegment(segment, new Map([...values].map(([id, tensor]) => [id, change(tensor, segment)])))
    }
  }
  return () => new Changed()
}

/** Loads something else than the source has. */
function loading(change: (tensor: Tensor) => Tensor): Create {
  class Loading extends NarrowBackend {
    override loadShard(source: ShardSource, options: LoadShardOptions): Promise<DeviceTensor> {
      return super.loadShard({ ...source, read: async (read) => change(await source.read(read)) }, options)
    }
  }
  return () => new Loading()
}

/** A backend with a method of its own. */
function overriding(make: (right: NarrowBackend) => Partial<Backend>): Create {
  return () => {
    const right = new NarrowBackend()
    const changed = make(right)
    return new Proxy(right, {
      get: (target, property) => {
        const own = changed[property as keyof Backend]
        if (own !== undefined) return own
        const value = Reflect.get(target, property, target) as unknown
        return typeof value === 'function' ? value.bind(target) : value
      },
    })
  }
}

/** Changes what is compiled. */
function executing(
  make: (executable: Executable, segment: Segment, right: NarrowBackend) => Partial<Executable>,
): Create {
  return overriding((right) => ({
    compile: async (segment, parameters) => {
      const executable = await right.compile(segment, parameters)
      const bound = { run: executable.run.bind(executable), dispose: executable.dispose.bind(executable) }
      return { ...bound, ...make(executable, segment, right) }
    },
  }))
}

const dispose = (): Promise<void> => Promise.resolve()

/** An executable that gives the tensors of its first run, with the content of the last. */
function stale(executable: Executable, right: NarrowBackend): Executable['run'] {
  let first: readonly DeviceTensor[] | undefined
  return async (inputs, parameters) => {
    const fresh = await executable.run(inputs, parameters)
    if (first === undefined) {
      first = fresh
      return fresh
    }
    for (const [i, tensor] of fresh.entries()) {
      const [to, from] = [await right.download(first[i] as DeviceTensor), await right.download(tensor)]
      ;(to as Tensor<'float32'>).data.set((from as Tensor<'float32'>).data)
    }
    return first
  }
}

const OPS = 'operations in float32'
const ATTENTION = 'attention'

/** A deliberately broken backend, and the group of checks that has to notice. */
export interface BrokenBackend {
  readonly what: string
  readonly group: string
  readonly create: Create
  /** What it has to declare. @default NARROW */
  readonly supports?: Capabilities
}

/** Mistakes in operations: each computes something, of the right shape in at least one case. */
const OPERATIONS: readonly (readonly [what: string, create: Create])[] = [
  ['add subtracts', renamed('add', 'sub')],
  ['sub the other way round', rearranged('sub', (inputs) => (sameShapes(inputs) ? inputs.toReversed() : inputs))],
  ['mul divides', renamed('mul', 'div')],
  ['div multiplies', renamed('div', 'mul')],
  ['add_scalar multiplies', renamed('add_scalar', 'mul_scalar')],
  ['mul_scalar adds', renamed('mul_scalar', 'add_scalar')],
  ['silu forgets the factor', renamed('silu', 'sin')],
  ['sin is cos', renamed('sin', 'cos')],
  ['cos is sin', renamed('cos', 'sin')],
  ['a transposed weight', instead('linear', transposedWeight)],
  [
    'linear on operands of 8 bits',
    operands((tensor, { nodes }) => (nodes[0]?.op === 'linear' ? tensor.cast('bfloat16').cast(tensor.dtype) : tensor)),
  ],
  [
    'embedding one row further',
    operands((tensor, { nodes }) =>
      nodes[0]?.op === 'embedding' && tensor.dtype === 'int32' ? mapped(tensor, (id) => Math.max(0, id - 1)) : tensor,
    ),
  ],
  [
    'reshape in column order',
    results((tensor, { nodes, inputs }) => {
      const [rows, columns] = inputs[0]?.shape ?? []
      if (nodes[0]?.op !== 'reshape' || inputs[0]?.shape.length !== 2 || !rows || !columns) return tensor
      const { data } = tensor.cast('float64')
      return mapped(tensor, (_, i) => data[(i % rows) * columns + Math.floor(i / rows)] as number)
    }),
  ],
  [
    'transpose by the inverse permutation',
    instead('transpose', (node) => {
      const from = numbers(node.attributes.permutation)
      const inverse = from.map((_, i) => from.indexOf(i))
      const shape = inverse.map((dim) => node.inputs[0]?.shape[dim])
      const fits = shape.join() === node.outputs[0]?.shape.join()
      return fits ? { ...node, attributes: { permutation: inverse } } : node
    }),
  ],
  [
    'split in another order',
    instead('split', (node) => (sameShapes(node.outputs) ? { ...node, outputs: node.outputs.toReversed() } : node)),
  ],
  ['concat in another order', rearranged('concat', (inputs) => inputs.toReversed())],
  ['layer_norm with another eps', attributed('layer_norm', () => ({ eps: 2e-6 }))],
  ['layer_norm without its bias', rearranged('layer_norm', (inputs) => inputs.slice(0, 2))],
  [
    'layer_norm without centring',
    instead('layer_norm', (node) => ({ ...node, op: 'rms_norm', inputs: node.inputs.slice(0, 2) })),
  ],
  ['rms_norm with centring', renamed('rms_norm', 'layer_norm')],
  ['rms_norm with another eps', attributed('rms_norm', () => ({ eps: 2e-6 }))],
  ['rms_norm without its weight', rearranged('rms_norm', (inputs) => inputs.slice(0, 1))],
  [
    'rms_norm across heads',
    instead('rms_norm', (node) => {
      const [x, weight] = node.inputs as [Node['inputs'][0], Node['inputs'][0] | undefined]
      if (x.shape.length < 3 || weight !== undefined) return node
      const joined = [...x.shape.slice(0, -2), x.shape.slice(-2).reduce((a, b) => a * b, 1)]
      const [before, after] = [
        { ...x, id: -1, shape: joined },
        { ...x, id: -2, shape: joined },
      ]
      const reshape = { op: 'reshape', path: '' }
      return [
        { ...reshape, inputs: [x], outputs: [before], attributes: { shape: joined } },
        { ...node, inputs: [before], outputs: [after] },
        { ...reshape, inputs: [after], outputs: node.outputs, attributes: { shape: x.shape } },
      ]
    }),
  ],
  ['group_norm in one group', attributed('group_norm', () => ({ groups: 1 }))],
  ['group_norm with weight and bias swapped', rearranged('group_norm', ([x, weight, bias]) => [x, bias, weight])],
  ['attention with a scale of 0.5', attributed(ATTENTION, () => ({ scale: 0.5 }))],
  ['attention that sees the future', attributed(ATTENTION, () => ({ causal: false }))],
  ['attention without its bias', rearranged(ATTENTION, (inputs) => inputs.slice(0, 3))],
  [
    'attention with keys and values swapped',
    rearranged(ATTENTION, ([q, k, v, ...bias]) =>
      sameShapes([k, v] as never) ? [q, v, k, ...bias] : [q, k, v, ...bias],
    ),
  ],
  [
    'NaN for a query that sees nothing',
    results((tensor, { nodes }) =>
      nodes[0]?.op === ATTENTION ? mapped(tensor, (value) => (value === 0 ? Number.NaN : value)) : tensor,
    ),
  ],
  ['rope in the other layout', attributed('rope', ({ interleaved }) => ({ interleaved: !interleaved }))],
  ['rope with cos and sin swapped', rearranged('rope', ([x, cos, sin]) => [x, sin, cos])],
  [
    'conv2d with the padding on the other side',
    attributed('conv2d', ({ padding }) => {
      const [top, bottom, left, right] = numbers(padding) as [number, number, number, number]
      return { padding: [bottom, top, right, left] }
    }),
  ],
  [
    'upsample of the neighbour',
    results((tensor, { nodes }) => {
      if (nodes[0]?.op !== 'upsample_nearest2d') return tensor
      const { data } = tensor.cast('float64')
      return mapped(tensor, (_, i) => data[Math.max(0, i - 1)] as number)
    }),
  ],
  [
    'the last element is wrong',
    results((tensor) => mapped(tensor, (value, i) => (i === tensor.data.length - 1 ? 0 : value))),
  ],
]

const OTHERS: readonly BrokenBackend[] = [
  {
    what: 'NaN for Infinity',
    group: 'segments',
    create: results((tensor) => mapped(tensor, (value) => (Number.isFinite(value) ? value : Number.NaN))),
  },
  {
    what: 'a result buffer is used again',
    group: 'segments',
    create: executing((e, _, right) => ({ run: stale(e, right) })),
  },
  {
    what: 'a reshape gives its operand',
    group: 'segments',
    create: () => {
      class Sharing extends NarrowBackend {
        protected override runSegment(segment: Segment, values: HostValues): readonly Tensor[] {
          const input = segment.nodes[0]?.op === 'reshape' ? values.get(segment.inputs[0]?.id ?? -1) : undefined
          const computed = super.runSegment(segment, values)
          return computed.map((tensor) => (input === undefined ? tensor : input.reshape(tensor.shape)))
        }
      }
      return new Sharing()
    },
  },
  {
    what: 'an executable keeps the weights it was compiled for',
    group: 'segments',
    create: overriding((right) => ({
      compile: async (segment, parameters) => {
        const executable = await right.compile(segment, parameters)
        const run: Executable['run'] = (inputs, given) =>
          executable.run(inputs, parameters?.length ? parameters : given)
        return { run, dispose: () => executable.dispose() }
      },
    })),
  },
  {
    what: 'a run writes into its inputs',
    group: 'segments',
    create: () => {
      class Writing extends NarrowBackend {
        protected override runSegment(segment: Segment, values: HostValues): readonly Tensor[] {
          const computed = super.runSegment(segment, values)
          for (const { id } of segment.inputs) (values.get(id) as Tensor<'float32'>).data.fill(0 as never)
          return computed
        }
      }
      return new Writing()
    },
  },
  {
    what: 'a constant is forgotten',
    group: 'segments',
    create: operands((tensor, { constants }) =>
      constants.some(({ data }) => data === tensor) ? mapped(tensor, () => 1) : tensor,
    ),
  },
  {
    what: 'slices begin one too early',
    group: 'shard loading',
    create: loading((tensor) => {
      const { data } = tensor.cast('float64')
      return mapped(tensor, (_, i) => data[(i + data.length - 1) % data.length] as number)
    }),
  },
  {
    what: 'a block is dropped',
    group: 'shard loading',
    create: loading((tensor) => mapped(tensor, (value, i) => (i >= (tensor.data.length * 3) / 4 ? 0 : value))),
  },
  {
    what: 'bfloat16 taken for float16',
    group: 'weights',
    create: loading((tensor) =>
      tensor.dtype === 'bfloat16' ? new Tensor('float16', tensor.shape, tensor.data as Uint16Array) : tensor,
    ),
  },
  {
    what: 'the slice for a split input is the first for every rank',
    group: 'styles',
    create: attributed('shard', ({ starts, ends }) => {
      const sizes = numbers(starts).map((start, i) => (numbers(ends)[i] as number) - start)
      return { starts: sizes.map(() => 0), ends: sizes }
    }),
  },
  {
    what: 'the slice for a split input is one element off',
    group: 'styles',
    create: attributed('shard', ({ starts, ends }) => {
      const shift = Math.min(...numbers(starts)) > 0 ? -1 : 1
      return { starts: numbers(starts).map((n) => n + shift), ends: numbers(ends).map((n) => n + shift) }
    }),
  },
  {
    what: 'features depend on how many there are',
    group: 'styles',
    create: results((tensor, { nodes }) =>
      nodes[0]?.op === 'linear'
        ? mapped(tensor, (value) => value * (1 + (tensor.shape.at(-1) as number) * 2 ** -24))
        : tensor,
    ),
  },
  {
    what: 'rotary tables of the wrong tokens',
    group: 'blocks and a tiny transformer, against torch',
    create: operands((tensor, { nodes }) => {
      if (!nodes.some(({ op }) => op === 'rope') || tensor.shape.length !== 2 || tensor.shape[1] !== 4) return tensor
      const { data } = tensor.cast('float64')
      return mapped(tensor, (_, i) => data[Math.max(0, i - 4)] as number)
    }),
  },
  {
    what: 'what was downloaded is used again',
    group: 'memory and dispose',
    create: executing((executable, _, right) => ({
      run: async (inputs, parameters) => {
        const computed = await executable.run(inputs, parameters)
        for (const tensor of computed) {
          const dispose = tensor.dispose.bind(tensor)
          const { data } = right.borrow(tensor)
          tensor.dispose = () => {
            data.fill(0 as never)
            dispose()
          }
        }
        return computed
      },
    })),
  },
  {
    what: 'a copy is lent',
    group: 'memory and dispose',
    create: overriding((right) => ({ borrow: (tensor) => right.borrow(tensor).clone() })),
  },
  {
    what: 'an address on a GPU is that of another value',
    group: 'memory and dispose',
    create: overriding(() => ({
      deviceMemory: { stream: 1n, borrow: ({ dtype, shape }) => ({ dtype, shape, dataPtr: 1n }) },
    })),
  },
  {
    what: 'declares a dtype that it does not compute in',
    group: 'capabilities',
    create: overriding(() => ({ supports: { dtypes: ['float32', 'float64', 'float16'] } as Capabilities })),
  },
  {
    what: 'declares bfloat16, and refuses it',
    group: 'operations in bfloat16',
    supports: { dtypes: ['float32', 'bfloat16'] },
    create: overriding(() => ({ supports: { dtypes: ['float32', 'bfloat16'] } as Capabilities })),
  },
  {
    what: 'does not declare a dtype that it computes in',
    group: 'capabilities',
    create: overriding(() => ({ supports: { dtypes: ['float32'] } as Capabilities })),
  },
  {
    what: 'computes in an undeclared dtype without a word',
    group: 'capabilities',
    create: () => {
      class Careless extends NarrowBackend {
        override loadShard(source: ShardSource, options: LoadShardOptions): Promise<DeviceTensor> {
          return super.loadShard(source, { ...options, dtype: 'float32' })
        }
      }
      return new Careless()
    },
  },
  {
    what: 'an unknown operation is skipped',
    group: 'errors',
    create: overriding((right) => ({
      compile: (segment, parameters) =>
        right.compile(
          { ...segment, nodes: segment.nodes.filter(({ op }) => op !== 'fft' && op !== 'toString') },
          parameters,
        ),
    })),
  },
  {
    what: 'errors have no code',
    group: 'errors',
    create: executing((executable) => ({
      run: (inputs, parameters) =>
        executable.run(inputs, parameters).catch((error: Error) => {
          throw new Error(error.message)
        }),
    })),
  },
  {
    what: 'ids outside of a table are taken for the last row',
    group: 'errors',
    create: operands((tensor) =>
      tensor.dtype === 'int32' ? mapped(tensor, (id) => Math.min(3, Math.max(0, id))) : tensor,
    ),
  },
  {
    what: 'runs what is disposed',
    group: 'errors',
    create: executing((_, segment) => {
      const immortal = new NarrowBackend().compile(segment)
      return { run: async (inputs, parameters) => (await immortal).run(inputs, parameters) }
    }),
  },
  {
    what: 'downloads what is disposed',
    group: 'errors',
    create: overriding((right) => ({
      upload: (tensor: Tensor) => Object.assign(right.upload(tensor), { dispose() {} }),
    })),
  },
  {
    what: 'reads before it refuses a dtype',
    group: 'shard loading',
    create: overriding((right) => ({
      loadShard: async (source: ShardSource, options: LoadShardOptions) => {
        await source.read()
        return right.loadShard(source, options)
      },
    })),
  },
  {
    what: 'does not look at the signal of a load',
    group: 'shard loading',
    create: overriding((right) => ({
      loadShard: (source: ShardSource, { dtype }: LoadShardOptions) => right.loadShard(source, { dtype }),
    })),
  },
  {
    what: 'weights that were freed are still counted',
    group: 'shard loading',
    create: overriding((right) => {
      let loads = 0
      return {
        loadShard: (source: ShardSource, options: LoadShardOptions) => {
          loads++
          return right.loadShard(source, options)
        },
        memory: (): MemoryReport => ({ ...right.memory(), weightBytes: loads * 96 }),
      }
    }),
  },
  {
    what: 'weights are not counted',
    group: 'shard loading',
    create: overriding((right) => ({ memory: (): MemoryReport => ({ ...right.memory(), weightBytes: 0 }) })),
  },
  {
    what: 'executables are never freed',
    group: 'memory and dispose',
    create: executing(() => ({ dispose })),
  },
  {
    what: 'every run leaves something behind',
    group: 'memory and dispose',
    create: overriding((right) => {
      let runs = 0
      return {
        compile: async (segment, parameters) => {
          const executable = await right.compile(segment, parameters)
          return {
            run: (inputs, given) => {
              runs++
              return executable.run(inputs, given)
            },
            dispose: () => executable.dispose(),
          }
        },
        memory: (): MemoryReport => ({ ...right.memory(), weightBytes: right.memory().weightBytes + runs }),
      }
    }),
  },
  {
    what: 'dispose frees nothing',
    group: 'memory and dispose',
    create: overriding(() => ({ dispose, [Symbol.asyncDispose]: dispose })),
  },
  {
    what: 'works on after dispose',
    group: 'memory and dispose',
    create: overriding((right) => ({
      upload: (tensor: Tensor) => {
        try {
          return right.upload(tensor)
        } catch {
          return new NarrowBackend().upload(tensor)
        }
      },
    })),
  },
]

/** All broken backends. */
export const BROKEN_BACKENDS: readonly BrokenBackend[] = [
  ...OPERATIONS.map(([what, create]) => ({ what, group: OPS, create })),
  ...OTHERS,
]

/** The ways to break a backend, which break nothing by themselves. */
export const UNBROKEN_BACKENDS: readonly Omit<BrokenBackend, 'group'>[] = [
  { what: 'rewriting', create: rewriting((node) => node) },
  { what: 'results', create: results((tensor) => tensor) },
  { what: 'operands', create: operands((tensor) => tensor) },
  { what: 'loading', create: loading((tensor) => tensor) },
  { what: 'overriding', create: overriding(() => ({})) },
  { what: 'executing', create: executing(() => ({})) },
]
