import { normal, OP_CASES, rotation } from '@rankwise/conformance'
import { relativeRms } from '@rankwise/conformance/compare'
import { type Backend, GraphExecutor, partition, type ShardSource, type Tensor, trace } from '@rankwise/core'
import { runRanks } from '@rankwise/core/reference'
import { describe, expect, it } from 'vitest'
import { type BlockSizes, blockInputs, Flux2SingleBlock } from '../../backend-ort/test/flux2-single-block.ts'
import { tfjs } from '../src/index.ts'
import { bfloat16Problem } from '../src/native/bfloat16-check.ts'
import { ENGINES, engineOf, hasNative } from './engines.ts'
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

  it.runIf(hasNative)('keeps matrices in bfloat16 and multiplies so, with medium precision', async () => {
    await using backend = await tfjs({ engine: 'native', threads: 1, float32MatmulPrecision: 'medium' })
    expect(backend.selection.float32MatmulPrecision).toBe('medium')
    const { rms, weightBytes } = await runBlock(backend)
    expect(rms).toBeLessThan(5e-3)
    expect(rms).toBeGreaterThan(1e-4)
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

describe.runIf(hasNative)('the check of bfloat16', () => {
  it('passes, and notices kernels that do something else', async () => {
    expect(bfloat16Problem(await engineOf('native'))).toBeUndefined()
    const negated = await engineOf('native')
    const matMul = negated.matMul.bind(negated)
    negated.matMul = (a, b, transposeB) => negated.binary('sub', negated.binary('sub', matMul(a, b, transposeB), a), b)
    expect(bfloat16Problem(negated)).toBeDefined()
    const swapped = await engineOf('native')
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
