import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { normal, OP_CASES, rotation } from '@rankwise/conformance'
import { relativeRms } from '@rankwise/conformance/compare'
import { type Backend, GraphExecutor, partition, type ShardSource, Tensor, trace } from '@rankwise/core'
import { runRanks } from '@rankwise/core/reference'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { type BlockSizes, blockInputs, Flux2SingleBlock } from '../../backend-ort/test/flux2-single-block.ts'
import { TfjsBackend } from '../src/backend.ts'
import type { Engine, Ref } from '../src/engine.ts'
import { tfjs } from '../src/index.ts'
import { bfloat16Problem } from '../src/native/bfloat16-check.ts'
import { hasFastBfloat16 } from '../src/native/fast-bfloat16.ts'
import { ENGINES, engineOf, hasNative, nativeEngine } from './engines.ts'
import { checkOp } from './support.ts'

const SIZES: BlockSizes = { heads: 4, headDim: 32, mlp: 384, tokens: 77 }

/** A weight as a file of bfloat16 has it. */
function sourceOf(name: string, weight: Tensor): ShardSource {
  const { dtype, shape, byteLength } = weight
  const read = async () => weight
  return {
    name,
    file: '/x',
    dtype,
    fullShape: shape,
    slices: undefined,
    shape,
    byteLength,
    ranges: () => undefined,
    read,
  }
}

function backendOf(engine: Engine): TfjsBackend {
  const { name, multipliesBfloat16 } = engine
  return new TfjsBackend(engine, { engine: name, float32MatmulPrecision: 'medium', multipliesBfloat16, rejected: [] })
}

/** Relative RMS of a FLUX.2 single block with bfloat16 weights against float64, and the bytes of its weights. */
async function runBlock(backend: Backend): Promise<{ readonly rms: number; readonly weightBytes: number }> {
  const block = new Flux2SingleBlock(SIZES)
  const graph = trace('block', block, blockInputs(SIZES), (inputs) => ({ out: block.call(inputs) }))
  const placed = partition(graph, new Map(), 1)
  const inputs = Object.fromEntries(graph.inputs.map(({ name = '', shape }, i) => [name, normal(shape, i)]))
  const given = { ...inputs, ...rotation(SIZES.tokens, SIZES.headDim / 2) }
  const weights = Object.fromEntries(
    [...block.namedParameters()].map(([name, { shape }], i) => {
      const spread = shape.length === 1 ? { mean: 1, deviation: 0.1 } : { deviation: (shape[1] as number) ** -0.5 }
      return [name, normal(shape, 10 + i, spread).cast('bfloat16') as Tensor]
    }),
  )
  const loaded = await Promise.all(
    Object.entries(weights).map(async ([name, weight]) => {
      return [name, await backend.loadShard(sourceOf(name, weight), { dtype: 'float32' })] as const
    }),
  )
  const executor = await GraphExecutor.compile(placed, { backend, collectives: undefined, weights: new Map(loaded) })
  const { out } = await executor.run(given)
  const [expected] = runRanks(placed, weights, given)
  await executor.dispose()
  return { rms: relativeRms(out as Tensor, expected?.out as Tensor), weightBytes: backend.memory().weightBytes }
}

const MATRIX_ELEMENTS = 128 * (3 * 128 + 2 * 384) + (128 + 384) * 128
const VECTOR_ELEMENTS = 2 * 32

describe('a FLUX.2 single block', () => {
  it.each(ENGINES)('computes on %s what float64 does', async (engine) => {
    await using backend = await tfjs({ engine, threads: 1 })
    const { rms, weightBytes } = await runBlock(backend)
    expect(rms).toBeLessThan(engine === 'wasm' ? 2e-6 : 1e-6)
    expect(weightBytes).toBe(4 * (MATRIX_ELEMENTS + VECTOR_ELEMENTS))
  })

  describe.runIf(hasNative)('keeps matrices in bfloat16', () => {
    const BYTES = 2 * MATRIX_ELEMENTS + 4 * VECTOR_ELEMENTS

    it('and multiplies so', async () => {
      await using backend = backendOf(nativeEngine('multiplied'))
      const { rms, weightBytes } = await runBlock(backend)
      expect(rms).toBeLessThan(5e-3)
      expect(rms).toBeGreaterThan(1e-4)
      expect(weightBytes).toBe(BYTES)
    })

    it('and casts them where they are used, whole or in pieces', async () => {
      const rows = 77
      for (const castBytes of [undefined, 4 * 128 * rows, 1]) {
        const engine = nativeEngine('stored')
        if (castBytes !== undefined) Object.defineProperty(engine, 'maxCastBytes', { value: castBytes })
        await using backend = backendOf(engine)
        const { rms, weightBytes } = await runBlock(backend)
        expect(rms).toBeLessThan(1e-6)
        expect(weightBytes).toBe(BYTES)
      }
    })
  })

  it.runIf(hasNative)('keeps matrices in bfloat16 with medium precision, and multiplies as is fast here', async () => {
    await using backend = await tfjs({ engine: 'native', threads: 1, float32MatmulPrecision: 'medium' })
    expect(backend.selection.float32MatmulPrecision).toBe('medium')
    expect(backend.selection.multipliesBfloat16).toBe(hasFastBfloat16())
    const { rms, weightBytes } = await runBlock(backend)
    expect(rms).toBeLessThan(hasFastBfloat16() ? 5e-3 : 1e-6)
    expect(weightBytes).toBe(2 * MATRIX_ELEMENTS + 4 * VECTOR_ELEMENTS)
    const weight = normal([3, 5], 1).cast('bfloat16') as Tensor
    const loaded = await backend.loadShard(sourceOf('weight', weight), { dtype: 'float32' })
    expect(await backend.download(loaded)).toEqual(weight)
  })

  it('falls back to float32 aloud where there is no bfloat16', async () => {
    const warned = new Promise<Error & { code?: string }>((resolve) => process.once('warning', resolve))
    await using backend = await tfjs({ engine: 'wasm', float32MatmulPrecision: 'medium' })
    expect((await warned).code).toBe('TFJS_BFLOAT16')
    expect(backend.selection.float32MatmulPrecision).toBe('highest')
    expect((await runBlock(backend)).rms).toBeLessThan(2e-6)
  })
})

describe.runIf(hasNative).each(['stored', 'multiplied'] as const)('the check of bfloat16, %s', (bfloat16) => {
  it('passes, and notices kernels that do something else', () => {
    expect(bfloat16Problem(nativeEngine(bfloat16))).toBeUndefined()
    const negated = nativeEngine(bfloat16)
    const matMul = negated.matMul.bind(negated)
    negated.matMul = (a, b, transposeB) => {
      const product = matMul(a, b, transposeB)
      return negated.binary('sub', negated.binary('sub', product, product), product)
    }
    expect(bfloat16Problem(negated)).toBeDefined()
    const swapped = nativeEngine(bfloat16)
    const write = swapped.write.bind(swapped)
    swapped.write = (dtype, shape, data) => {
      return write(dtype, shape, data instanceof Uint16Array ? data.map((bits) => (bits << 8) | (bits >> 8)) : data)
    }
    expect(bfloat16Problem(swapped)).toContain('product')
  })
})

it.each(ENGINES)('attention on %s computes the same a few queries at a time', async (name) => {
  const engine = await engineOf(name)
  Object.defineProperty(engine, 'maxScoreBytes', { value: 4 * 2 * 4 * 3 * 13 })
  for (const opCase of OP_CASES.filter(({ op }) => op === 'attention')) await checkOp(engine, opCase)
})

describe('the CPU multiplies bfloat16 fast', () => {
  let folder: string
  beforeAll(async () => {
    folder = await mkdtemp(join(tmpdir(), 'rankwise-cpuinfo-'))
  })
  afterAll(() => rm(folder, { recursive: true }))

  it.each([
    ['with AMX', 'flags\t\t: fpu avx512_bf16 amx_bf16 amx_tile', true],
    ['not with AVX512_BF16 alone', 'flags\t\t: fpu avx512_bf16\nbugs\t\t: amx_bf16', false],
    ['not with another flag of AMX', 'flags\t\t: amx_tile amx_bf16_other', false],
  ])('%s', async (name, text, isFast) => {
    const path = join(folder, name)
    await writeFile(path, `processor\t: 0\n${text}\n`)
    expect(hasFastBfloat16(path)).toBe(isFast)
  })

  it('not where nothing is known of it', () => {
    expect(hasFastBfloat16(join(folder, 'missing'))).toBe(false)
  })
})

it('products of more than fit one sum in WebAssembly are those of all parts', async () => {
  const engine = await engineOf('wasm')
  const inner = 2 * 3072 + 5
  const [a, b] = [normal([1, 2, inner], 1), normal([1, inner, 3], 2)]
  const before = engine.liveTensors
  const [product] = engine.tidy(() => [
    engine.matMul(engine.write('float32', a.shape, a.data), engine.write('float32', b.shape, b.data), false),
  ]) as [Ref]
  const expected = Array.from({ length: 6 }, (_, n) => {
    const terms = Array.from({ length: inner }, (_, k) => {
      return (a.data[Math.floor(n / 3) * inner + k] as number) * (b.data[k * 3 + (n % 3)] as number)
    })
    return terms.reduce((sum, term) => sum + term, 0)
  })
  const computed = Tensor.float32(product.shape, engine.read(product) as Float32Array)
  engine.free(product)
  expect(relativeRms(computed, Tensor.float32([1, 2, 3], expected))).toBeLessThan(5e-6)
  expect(engine.liveTensors).toBe(before)
})
