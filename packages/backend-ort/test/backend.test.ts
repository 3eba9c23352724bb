import {
  type Backend,
  Checkpoint,
  constant,
  type DeviceTensor,
  type Executable,
  embedding,
  Linear,
  Module,
  Parameter,
  RankwiseError,
  type Segment,
  shard,
  shardSlices,
  Tensor,
  type TracedTensor,
  trace,
} from '@rankwise/core'
import { ReferenceBackend, shardTensor } from '@rankwise/core/reference'
import { referencePath } from '@rankwise/fixtures'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { ort } from '../src/index.ts'
import { graphOf, normal, requireClose, segmentOf, TOLERANCE, weightOf } from './support.ts'

class TextEncoder extends Module {
  readonly embed_tokens: Embed
  readonly proj: Linear

  constructor() {
    super()
    this.embed_tokens = new Embed()
    this.proj = new Linear(3, 2)
  }

  override forward(ids: TracedTensor): TracedTensor {
    return this.proj.call(this.embed_tokens.call(ids))
  }
}

class Embed extends Module {
  readonly weight = new Parameter([5, 3])

  override forward(ids: TracedTensor): TracedTensor {
    return embedding(ids, this.weight)
  }
}

function encoderSegment(): Segment {
  const model = new TextEncoder()
  return segmentOf(
    trace('encoder', model, { ids: { dtype: 'int32', shape: [4] } }, ({ ids }) => ({ y: model.call(ids) })),
  )
}

const WEIGHTS = [normal([5, 3], 1), normal([2, 3], 2), normal([2], 3)]

let backend: Backend
beforeEach(async () => {
  backend = await ort({ device: 'cpu', threads: 1 })
})
afterEach(() => backend.dispose())

function upload(tensors: readonly Tensor[]): DeviceTensor[] {
  return tensors.map((tensor) => backend.upload(tensor))
}

const ids = (...values: number[]) => upload([Tensor.int32([values.length], values)])

describe('compile and run', () => {
  it('runs a segment with its weights as arguments', async () => {
    const segment = encoderSegment()
    const given = [Tensor.int32([4], [4, 0, 3, 3]), ...WEIGHTS]
    const executable = await backend.compile(segment)
    const [result] = await executable.run(ids(4, 0, 3, 3), upload(WEIGHTS))
    const reference = new ReferenceBackend()
    const referenceRun = await reference.compile(segment)
    const [onReference, ...weights] = given.map((tensor) => reference.upload(tensor))
    const [expected] = await referenceRun.run([onReference as DeviceTensor], weights)
    requireClose(
      await backend.download(result as DeviceTensor),
      await reference.download(expected as DeviceTensor),
      TOLERANCE,
    )
  })

  it('runs one executable with several weights', async () => {
    const executable = await backend.compile(segmentOf(graphOf('mul', [normal([3], 0), normal([3], 0)], {})))
    const results = [
      [1, 2, 3],
      [4, 5, 6],
    ].map(async (values) => {
      const [result] = await executable.run(upload([Tensor.float32([3], values), Tensor.float32([3], [2, 2, 2])]), [])
      return [...(await backend.download(result as DeviceTensor)).data]
    })
    expect(await Promise.all(results)).toEqual([
      [2, 4, 6],
      [8, 10, 12],
    ])
  })

  it('keeps inputs as they are, and reads views and shared memory', async () => {
    const executable = await backend.compile(segmentOf(graphOf('add_scalar', [normal([3], 0)], { value: 1 })))
    const buffer = Float32Array.of(9, 1, 2, 3, 9)
    const shared = new Float32Array(new SharedArrayBuffer(12))
    shared.set([1, 2, 3])
    for (const data of [buffer.subarray(1, 4), shared]) {
      const [result] = await executable.run(upload([Tensor.float32([3], data)]), [])
      expect([...(await backend.download(result as DeviceTensor)).data]).toEqual([2, 3, 4])
    }
    expect([...buffer]).toEqual([9, 1, 2, 3, 9])
  })

  it('takes constants', async () => {
    const graph = trace('constants', new TextEncoder(), { ids: { dtype: 'int32', shape: [2] } }, ({ ids }) => ({
      y: embedding(ids, constant(Tensor.float32([2, 1], [7, 8]))).mul(constant(Tensor.float32([1], [10]))),
    }))
    const executable = await backend.compile(segmentOf(graph))
    const [result] = await executable.run(ids(1, 0), [])
    expect([...(await backend.download(result as DeviceTensor)).data]).toEqual([80, 70])
  })

  it('takes inputs and weights that nothing reads', async () => {
    const segment = segmentOf(graphOf('mul_scalar', [normal([3], 0)], { value: 2 }))
    const unread = { id: 8, kind: 'input', dtype: 'float32', shape: [0] } as const
    const weight = { id: 9, kind: 'parameter', dtype: 'float32', shape: [2], name: 'weight' } as const
    const executable = await backend.compile({ ...segment, inputs: [...segment.inputs, unread], parameters: [weight] })
    const [result] = await executable.run(upload([normal([3], 0), normal([0], 0)]), upload([normal([2], 0)]))
    expect(result?.shape).toEqual([3])
  })

  it('gives several outputs, one value twice, and an input as an output', async () => {
    const segment = segmentOf(graphOf('sub', [normal([2], 0), normal([2], 0)], {}))
    const [output, input] = [segment.outputs[0], segment.inputs[1]]
    const outputs = [output, input, output] as Segment['outputs']
    const executable = await backend.compile({ ...segment, outputs })
    const results = await executable.run(upload([Tensor.float32([2], [5, 6]), Tensor.float32([2], [1, 2])]), [])
    const values = await Promise.all(results.map(async (result) => [...(await backend.download(result)).data]))
    expect(values).toEqual([
      [4, 4],
      [1, 2],
      [4, 4],
    ])
  })

  it('names the module whose operation ORT refuses', async () => {
    const segment = segmentOf(graphOf('silu', [Tensor.int32([2], [1, 2])], {}))
    await expect(backend.compile(segment)).rejects.toMatchObject({
      code: 'ORT_COMPILE',
      where: 'module',
      message: expect.stringContaining('QuickGelu'),
      cause: expect.any(Error),
    })
    expect(backend.memory().executables).toBe(0)
  })

  it('names the module whose operation fails while it runs', async () => {
    const executable = await backend.compile(encoderSegment())
    for (const id of [5, -1]) {
      await expect(executable.run(ids(0, 0, id, 0), upload(WEIGHTS))).rejects.toMatchObject({
        code: 'ORT_RUN',
        where: 'embed_tokens',
        message: expect.stringContaining('Gather'),
      })
    }
  })

  it('refuses an operation without lowering by its name and module', async () => {
    const segment = encoderSegment()
    const nodes = segment.nodes.map((node, i) => (i === 1 ? { ...node, op: 'fft' } : node))
    await expect(backend.compile({ ...segment, nodes })).rejects.toMatchObject({
      code: 'OP_UNSUPPORTED',
      where: 'proj',
      actual: { op: 'fft' },
    })
    const inherited = segment.nodes.map((node) => ({ ...node, op: 'toString' }))
    await expect(backend.compile({ ...segment, nodes: inherited })).rejects.toMatchObject({ code: 'OP_UNSUPPORTED' })
  })

  it('refuses values of other dtypes', async () => {
    const model = new Linear(3, 2)
    const graph = trace(
      'half',
      model,
      { x: { dtype: 'bfloat16', shape: [3] } },
      ({ x }) => ({ y: model.call(x) }),
      'bfloat16',
    )
    await expect(backend.compile(segmentOf(graph))).rejects.toMatchObject({ code: 'DTYPE_UNSUPPORTED', where: 'x' })
    expect(() => backend.upload(Tensor.zeros('float64', [1]))).toThrow(
      expect.objectContaining({ code: 'DTYPE_UNSUPPORTED' }),
    )
  })

  it('says when a segment computes another shape than its graph says', async () => {
    const graph = graphOf('transpose', [normal([2, 3], 0)], { permutation: [1, 0] })
    const nodes = graph.nodes.map((node) => ({ ...node, attributes: { permutation: [0, 1] } }))
    const executable = await backend.compile(segmentOf({ ...graph, nodes }))
    await expect(executable.run(upload([normal([2, 3], 0)]), [])).rejects.toMatchObject({ code: 'ORT_SHAPE' })
  })
})

describe('arguments', () => {
  let executable: Executable
  beforeEach(async () => {
    executable = await backend.compile(encoderSegment())
  })

  it.each([
    { what: 'too few weights', weights: WEIGHTS.slice(0, 2) },
    { what: 'another shape', weights: [normal([4, 3], 0), ...WEIGHTS.slice(1)] },
    { what: 'another dtype', weights: [Tensor.zeros('int32', [5, 3]), ...WEIGHTS.slice(1)] },
  ])('are refused with $what', async ({ weights }) => {
    await expect(executable.run(ids(0, 0, 0, 0), upload(weights))).rejects.toMatchObject({ code: 'ARGUMENT_MISMATCH' })
  })

  it('are refused when they are stored otherwise than those it was compiled for', async () => {
    const halves = WEIGHTS.map((weight) => weightOf(weight.cast('bfloat16')))
    const pieces = halves.with(0, weightOf(WEIGHTS[0]?.cast('bfloat16') as Tensor, [2, 3]))
    const other = await backend.compile(encoderSegment(), halves)
    for (const [compiled, weights] of [
      [executable, halves],
      [other, upload(WEIGHTS)],
      [other, pieces],
    ] as const) {
      await expect(compiled.run(ids(0, 0, 0, 0), weights)).rejects.toMatchObject({ code: 'ARGUMENT_MISMATCH' })
    }
    await expect(other.run(ids(0, 0, 0, 0), pieces)).rejects.toMatchObject({
      where: 'embed_tokens.weight',
      actual: { given: 'bfloat16 2|3[5, 3]', compiled: 'bfloat16[5, 3]' },
    })
    expect((await other.run(ids(0, 0, 0, 0), halves))[0]?.shape).toEqual([4, 2])
  })

  it.each([
    { what: 'too few weights', weights: WEIGHTS.slice(0, 2) },
    { what: 'another shape', weights: [normal([4, 3], 0), ...WEIGHTS.slice(1)] },
    { what: 'integers', weights: [Tensor.zeros('int32', [5, 3]), ...WEIGHTS.slice(1)] },
  ])('are not compiled for with $what', async ({ weights }) => {
    await expect(backend.compile(encoderSegment(), upload(weights))).rejects.toMatchObject({
      code: 'ARGUMENT_MISMATCH',
    })
    expect(backend.memory().executables).toBe(1)
  })

  it('are refused when another backend made them', async () => {
    const foreign = new ReferenceBackend().upload(WEIGHTS[0] as Tensor)
    const weights = [foreign, ...upload(WEIGHTS.slice(1))]
    await expect(executable.run(ids(0, 0, 0, 0), weights)).rejects.toMatchObject({ code: 'TENSOR_FOREIGN' })
    await expect(backend.compile(encoderSegment(), weights)).rejects.toMatchObject({ code: 'TENSOR_FOREIGN' })
    await expect(backend.download(foreign)).rejects.toMatchObject({ code: 'TENSOR_FOREIGN' })
  })

  it('are refused once they are disposed', async () => {
    const weights = upload(WEIGHTS)
    weights[1]?.dispose()
    weights[1]?.dispose()
    await expect(executable.run(ids(0, 0, 0, 0), weights)).rejects.toMatchObject({ code: 'TENSOR_DISPOSED' })
    await expect(backend.download(weights[1] as DeviceTensor)).rejects.toMatchObject({ code: 'TENSOR_DISPOSED' })
  })
})

describe('loadShard', () => {
  const directory = referencePath('flux2-tiny-bf16', 'transformer')
  const name = 'single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight'

  it('keeps the slice of a bfloat16 weight in its dtype', async () => {
    await using checkpoint = await Checkpoint.open(directory)
    const whole = await checkpoint.read(name)
    expect(whole.dtype).toBe('bfloat16')
    const [rows, columns] = whole.shape as [number, number]
    for (const placement of [shard(0, [rows]), shard(1, [columns / 2, columns / 2])]) {
      const source = checkpoint.source(name, shardSlices(placement, 1, 2))
      const weight = await backend.loadShard(source, { dtype: 'float32' })
      expect(weight.dtype).toBe('bfloat16')
      const downloaded = await backend.download(weight)
      expect(downloaded.dtype).toBe('bfloat16')
      requireClose(downloaded.cast('float32'), shardTensor(whole, placement, 1, 2), 0)
    }
  })

  it.each(['mapped', 'read'] as const)('counts the bytes of the weights that are loaded: %s', async (weights) => {
    await using checkpoint = await Checkpoint.open(directory)
    await using backend = await ort({ device: 'cpu', weights })
    const source = checkpoint.source(name)
    const [first, second] = [
      await backend.loadShard(source, { dtype: 'float32' }),
      await backend.loadShard(source, { dtype: 'float32' }),
    ]
    const bytes = (weightBytes: number) => (weights === 'read' ? [weightBytes, 0] : [0, weightBytes])
    const counted = () => [backend.memory().weightBytes, backend.memory().mappedBytes]
    expect(counted()).toEqual(bytes(2 * source.byteLength))
    first.dispose()
    first.dispose()
    expect(counted()).toEqual(bytes(source.byteLength))
    await backend.dispose()
    expect(counted()).toEqual([0, 0])
    await expect(backend.download(second)).rejects.toMatchObject({ code: 'TENSOR_DISPOSED' })
  })

  it('refuses a dtype before it reads', async () => {
    await using checkpoint = await Checkpoint.open(directory)
    const read = () => {
      throw new Error('was read')
    }
    const source = { ...checkpoint.source(name), ranges: read, read }
    await expect(backend.loadShard(source, { dtype: 'bfloat16' })).rejects.toMatchObject({
      code: 'DTYPE_UNSUPPORTED',
      where: name,
    })
  })

  it('stops when it is aborted', async () => {
    await using checkpoint = await Checkpoint.open(directory)
    const signal = AbortSignal.abort()
    for (const slices of [undefined, shardSlices(shard(1, [64]), 0, 2)]) {
      const loading = backend.loadShard(checkpoint.source(name, slices), { dtype: 'float32', signal })
      await expect(loading).rejects.toMatchObject({ code: 'ABORTED' })
    }
    expect(backend.memory()).toMatchObject({ weightBytes: 0, mappedBytes: 0 })
  })
})

describe('dispose', () => {
  it('frees executables one by one and all together', async () => {
    const [first, second] = [await backend.compile(encoderSegment()), await backend.compile(encoderSegment())]
    expect(backend.memory().executables).toBe(2)
    await first.dispose()
    await first.dispose()
    expect(backend.memory().executables).toBe(1)
    await expect(first.run(ids(0, 0, 0, 0), upload(WEIGHTS))).rejects.toMatchObject({ code: 'EXECUTABLE_DISPOSED' })
    const [tensors, weights] = [ids(0, 0, 0, 0), upload(WEIGHTS)]
    await backend.dispose()
    await backend.dispose()
    expect(backend.memory().executables).toBe(0)
    await expect(second.run(tensors, weights)).rejects.toMatchObject({ code: 'EXECUTABLE_DISPOSED' })
  })

  it('waits for runs that are under way', async () => {
    const executable = await backend.compile(encoderSegment())
    const running = executable.run(ids(1, 2, 3, 4), upload(WEIGHTS))
    await backend.dispose()
    expect((await running)[0]?.shape).toEqual([4, 2])
  })

  it('leaves nothing of a segment that is being compiled', async () => {
    const compiling = backend.compile(encoderSegment())
    const refused = expect(compiling).rejects.toMatchObject({ code: 'BACKEND_DISPOSED' })
    await backend.dispose()
    await refused
    expect(backend.memory().executables).toBe(0)
  })

  it('refuses new work', async () => {
    await backend.dispose()
    await expect(backend.compile(encoderSegment())).rejects.toMatchObject({ code: 'BACKEND_DISPOSED' })
    expect(() => backend.upload(WEIGHTS[0] as Tensor)).toThrow(RankwiseError)
  })
})
