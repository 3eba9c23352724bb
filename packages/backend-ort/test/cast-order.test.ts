import { mkdtemp, readdir, readFile, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { segmentOf } from '@rankwise/conformance'
import { Linear, Module, ModuleList, type TensorType, type TracedTensor, trace } from '@rankwise/core'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { loadOnnxruntime } from '../src/engine/onnxruntime.ts'
import { lowerSegment } from '../src/lowering/lower-segment.ts'
import type { OnnxModel, OnnxNode } from '../src/onnx/model.ts'
import { writeModel } from '../src/onnx/model-writer.ts'
import { wholeStorage } from '../src/weight-storage.ts'

const LAYERS = 8
const WIDTH = 16
const X: TensorType = { dtype: 'float32', shape: [2, WIDTH] }

class Layers extends Module {
  readonly layers = new ModuleList(Array.from({ length: LAYERS }, () => new Linear(WIDTH, WIDTH, { bias: false })))

  override forward(x: TracedTensor): TracedTensor {
    let value = x
    for (let i = 0; i < LAYERS; i++) value = value.add(this.layers.at(i).call(value.silu()))
    return value
  }
}

function lowerLayers(): OnnxModel {
  const model = new Layers()
  const segment = segmentOf(trace('layers', model, { x: X }, ({ x }) => ({ y: model.call(x) })))
  return lowerSegment(
    segment,
    segment.parameters.map(({ shape }) => wholeStorage('bfloat16', shape)),
  ).model
}

/** The model with every node as late as it can be: casts right before what reads them. */
function inPlace(model: OnnxModel): OnnxModel {
  const nodes: OnnxNode[] = []
  const emit = (node: OnnxNode) => {
    if (nodes.includes(node)) return
    for (const producer of model.nodes.filter(({ outputs }) => outputs.some((name) => node.inputs.includes(name)))) {
      emit(producer)
    }
    nodes.push(node)
  }
  for (const node of model.nodes.filter(({ opType }) => opType !== 'Cast' && opType !== 'BitCast')) emit(node)
  return { ...model, nodes }
}

/** Most weights that are float32 at a time: cast and not yet used. */
function mostCast(kernels: readonly string[]): number {
  const counts = kernels.map((_, i) => {
    const past = kernels.slice(0, i + 1)
    return past.filter((kernel) => kernel === 'Cast').length - past.filter((kernel) => kernel === 'FusedMatMul').length
  })
  return Math.max(...counts)
}

let directory: string
beforeEach(async () => {
  directory = await mkdtemp(join(tmpdir(), 'rankwise-profile-'))
})
afterEach(() => rm(directory, { recursive: true }))

/** The kernels of one run, in the order in which ORT runs them. */
async function kernelsOf(model: OnnxModel): Promise<readonly string[]> {
  const onnxruntime = await loadOnnxruntime()
  const session = await onnxruntime.InferenceSession.create(writeModel(model), {
    graphOptimizationLevel: 'basic',
    enableProfiling: true,
    profileFilePrefix: join(directory, 'profile'),
  })
  const feeds = model.inputs.map(({ name, dtype, shape }) => {
    const length = shape.reduce((product, size) => product * size, 1)
    const data = dtype === 'uint16' ? new Uint16Array(length) : new Float32Array(length)
    return [name, new onnxruntime.Tensor(data, shape)]
  })
  await session.run(Object.fromEntries(feeds))
  session.endProfiling()
  await session.release()
  const [file] = await readdir(directory)
  const events: readonly { readonly name: string; readonly ts: number }[] = JSON.parse(
    await readFile(join(directory, file as string), 'utf8'),
  )
  const kernels = events.filter(({ name }) => name.endsWith('_kernel_time')).sort((a, b) => a.ts - b.ts)
  return kernels.map(({ name }) => /(\w+?)_\d+_kernel_time$/.exec(name)?.[1] ?? name)
}

describe('ONNX Runtime', () => {
  it('casts a weight when it is used, and not the weights of all layers first', async () => {
    const kernels = await kernelsOf(lowerLayers())
    expect(kernels.filter((kernel) => kernel === 'Cast')).toHaveLength(LAYERS)
    expect(mostCast(kernels)).toBe(1)
  })

  it('would cast them all first if they came after the rest', async () => {
    expect(mostCast(await kernelsOf(inPlace(lowerLayers())))).toBe(LAYERS)
  })
})
