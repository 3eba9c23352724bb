import { mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { normal, opGraph, segmentOf } from '@rankwise/conformance'
import { Checkpoint, Module, type Segment, Tensor, type TracedTensor, trace, writeSafetensors } from '@rankwise/core'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { type OrtBackend, ort } from '../src/index.ts'
import type { WeightTensor } from '../src/weight-tensor.ts'
import { runSegment, weightOf } from './support.ts'

class Empty extends Module {
  override forward(): void {}
}

type Traced = Readonly<Record<string, TracedTensor>>

let backend: OrtBackend
beforeEach(async () => {
  backend = await ort({ device: 'cpu', threads: 1 })
})
afterEach(() => backend.dispose())

async function run(segment: Segment, inputs: readonly Tensor[]): Promise<readonly Tensor[]> {
  const executable = await backend.compile(segment)
  const results = await executable.run(
    inputs.map((tensor) => backend.upload(tensor)),
    [],
  )
  return Promise.all(results.map((result) => backend.download(result)))
}

describe('values in bfloat16', () => {
  const x = normal([40, 33], 1, { deviation: 3 }).cast('bfloat16')

  it('are rounded after every operation of a segment, to the bit', async () => {
    // Factors and summands of few bits: what is rounded is exact in float32.
    const graph = trace('chain', new Empty(), { x }, (traced: Traced) => ({
      y: traced.x?.mul(1.125).add(0.375).mul(0.625).mul(1.375).add(-0.125) as TracedTensor,
    }))
    const rounded = (tensor: Tensor, f: (value: number) => number) =>
      new Tensor('float64', x.shape, tensor.cast('float64').data.map(f)).cast('bfloat16')
    const steps: readonly ((value: number) => number)[] = [
      (value) => value * 1.125,
      (value) => value + 0.375,
      (value) => value * 0.625,
      (value) => value * 1.375,
      (value) => value - 0.125,
    ]
    const [y] = await run(segmentOf(graph), [x])
    expect(y).toMatchObject({ dtype: 'bfloat16', shape: [40, 33] })
    expect(y?.data).toEqual(steps.reduce<Tensor>(rounded, x).data)
    // Rounding once, at the end, gives others.
    const once = rounded(x, (value) => steps.reduce((from, step) => step(from), value))
    expect(y?.data).not.toEqual(once.data)
  })

  it('leave and enter float32 where they are cast', async () => {
    const graph = trace('casts', new Empty(), { x }, ({ x: given }: Traced) => {
      const wide = (given as TracedTensor).to('float32').mul(1.1)
      return { wide, narrow: wide.to('bfloat16'), again: wide.to('bfloat16').to('float32') }
    })
    const [wide, narrow, again] = await run(segmentOf(graph), [x])
    const rounded = (wide as Tensor).cast('bfloat16')
    expect(wide?.dtype).toBe('float32')
    expect(narrow).toEqual(rounded)
    expect(again).toEqual(rounded.cast('float32'))
  })

  it('are not taken for float32, nor float32 for them', async () => {
    for (const [dtype, other] of [
      ['bfloat16', 'float32'],
      ['float32', 'bfloat16'],
    ] as const) {
      const executable = await backend.compile(segmentOf(opGraph('silu', [x.cast(dtype)], {})))
      await expect(executable.run([backend.upload(x.cast(other))], [])).rejects.toMatchObject({
        code: 'ARGUMENT_MISMATCH',
      })
    }
  })

  it('are refused where an operation within a segment leaves what ORT computes in', async () => {
    const graph = trace('half', new Empty(), { x }, (traced: Traced) => ({
      y: traced.x?.to('float16').to('bfloat16') as TracedTensor,
    }))
    await expect(backend.compile(segmentOf(graph))).rejects.toMatchObject({ code: 'DTYPE_UNSUPPORTED' })
  })
})

describe('weights that are computed in bfloat16', () => {
  const weights = {
    wide: normal([300, 40], 2),
    half: normal([300, 40], 3).cast('float16'),
    narrow: normal([300, 40], 4).cast('bfloat16'),
  }
  const rounded = (name: keyof typeof weights) => weights[name].cast('float32').cast('bfloat16')
  let directory: string
  let checkpoint: Checkpoint
  beforeEach(async () => {
    directory = await mkdtemp(join(tmpdir(), 'rankwise-bfloat16-'))
    const file = join(directory, 'diffusion_pytorch_model.safetensors')
    await writeSafetensors(file, new Map<string, Tensor>(Object.entries(weights)))
    checkpoint = await Checkpoint.open(directory)
  })
  afterEach(async () => {
    await checkpoint.close()
    await rm(directory, { recursive: true })
  })

  const loadFrom = async (from: OrtBackend, name: string) =>
    (await from.loadShard(checkpoint.source(name), { dtype: 'bfloat16' })) as WeightTensor

  it('stay in their file where that has them', async () => {
    const weight = await loadFrom(backend, 'narrow')
    expect(weight).toMatchObject({ storage: 'bfloat16', isMapped: true })
    expect(await backend.download(weight)).toEqual(weights.narrow)
  })

  it.each(['wide', 'half'] as const)('are rounded when they are loaded, and take half the memory: %s', async (name) => {
    const weight = await loadFrom(backend, name)
    expect(weight).toMatchObject({ storage: 'bfloat16', isMapped: false })
    expect(await backend.download(weight)).toEqual(rounded(name))
    expect(backend.memory()).toMatchObject({ weightBytes: 300 * 40 * 2, mappedBytes: 0 })
  })

  it.each(['wide', 'half'] as const)(
    'are refused where they must be mapped and have to be rounded: %s',
    async (name) => {
      await using mapping = await ort({ device: 'cpu', weights: 'mapped' })
      await expect(loadFrom(mapping, name)).rejects.toMatchObject({ code: 'BACKEND_MAPPING' })
      expect((await loadFrom(mapping, 'narrow')).isMapped).toBe(true)
    },
  )

  it.each(['float32', 'float16'] as const)('are rounded by the graph where they are kept in %s', async (stored) => {
    const x = normal([7, 40], 5).cast('bfloat16')
    const segment = segmentOf(opGraph('linear', [x, rounded('wide')], {}, [1]))
    const kept = weights.wide.cast('float16').cast(stored)
    const [actual] = await runSegment(segment, [x], [weightOf(kept)])
    const [expected] = await runSegment(segment, [x], [weightOf(kept.cast('float32').cast('bfloat16'))])
    expect(actual).toEqual(expected)
  })
})
