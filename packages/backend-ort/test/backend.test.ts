import { normal, opGraph, segmentOf } from '@rankwise/conformance'
import {
  type Backend,
  Checkpoint,
  type DeviceTensor,
  type Executable,
  embedding,
  Linear,
  Module,
  Parameter,
  type Segment,
  shard,
  shardSlices,
  Tensor,
  type TracedTensor,
  trace,
} from '@rankwise/core'
import { shardTensor } from '@rankwise/core/reference'
import { referencePath } from '@rankwise/fixtures'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { ort } from '../src/index.ts'
import { requireClose, weightOf } from './support.ts'

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
  it('gives several outputs, one value twice, and an input as an output', async () => {
    const segment = segmentOf(opGraph('sub', [normal([2], 0), normal([2], 0)], {}))
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

  it('reads memory that several threads share', async () => {
    const executable = await backend.compile(segmentOf(opGraph('add', [normal([2], 0), normal([2], 0)], {})))
    const shared = new Float32Array(new SharedArrayBuffer(8))
    shared.set([1, 2])
    const [result] = await executable.run(upload([new Tensor('float32', [2], shared), normal([2], 0)]), [])
    const [a, b] = normal([2], 0).data as Float32Array
    expect((await backend.download(result as DeviceTensor)).data).toEqual(
      Float32Array.of(1 + (a as number), 2 + (b as number)),
    )
  })

  it('names the module whose operation ORT refuses', async () => {
    const segment = segmentOf(opGraph('silu', [Tensor.int32([2], [1, 2])], {}))
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

  it('refuses to upload values of other dtypes', () => {
    expect(() => backend.upload(Tensor.zeros('float64', [1]))).toThrow(
      expect.objectContaining({ code: 'DTYPE_UNSUPPORTED' }),
    )
  })

  it('says when a segment computes another shape than its graph says', async () => {
    const graph = opGraph('transpose', [normal([2, 3], 0)], { permutation: [1, 0] })
    const nodes = graph.nodes.map((node) => ({ ...node, attributes: { permutation: [0, 1] } }))
    const executable = await backend.compile(segmentOf({ ...graph, nodes }))
    await expect(executable.run(upload([normal([2, 3], 0)]), [])).rejects.toMatchObject({
      code: 'ORT_SHAPE',
      actual: { computed: [2, 3], graph: [3, 2] },
    })
  })
})

describe('arguments', () => {
  let executable: Executable
  beforeEach(async () => {
    executable = await backend.compile(encoderSegment())
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

  it('are refused when they are integers', async () => {
    const weights = upload([Tensor.zeros('int32', [5, 3]), ...WEIGHTS.slice(1)])
    await expect(executable.run(ids(0, 0, 0, 0), weights)).rejects.toMatchObject({ code: 'ARGUMENT_MISMATCH' })
    await expect(backend.compile(encoderSegment(), weights)).rejects.toMatchObject({ code: 'ARGUMENT_MISMATCH' })
    expect(backend.memory().executables).toBe(1)
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
})
