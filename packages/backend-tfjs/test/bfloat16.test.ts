import { backendChecks, normal, opGraph, segmentOf } from '@rankwise/conformance'
import { type Backend, type Capabilities, type ShardSource, sizeOf, type Tensor } from '@rankwise/core'
import { describe, expect, it } from 'vitest'
import { TfjsBackend } from '../src/backend.ts'
import type { Engine } from '../src/engine.ts'
import { bfloat16Problem } from '../src/native/bfloat16-check.ts'
import { ENGINES, engineOf, hasNative, nativeEngine } from './engines.ts'

function backendOf(engine: Engine): TfjsBackend {
  const { name, multipliesBfloat16 } = engine
  return new TfjsBackend(engine, { engine: name, float32MatmulPrecision: 'highest', multipliesBfloat16, rejected: [] })
}

function sourceOf(tensor: Tensor): ShardSource {
  const { dtype, shape, byteLength } = tensor
  return {
    ...{ name: 'weight', file: 'in memory', dtype, fullShape: shape, slices: undefined, shape, byteLength },
    ranges: () => undefined,
    read: async () => tensor,
  }
}

/** The checks of some groups of the suite, on an engine. */
function defineGroups(create: () => Backend, supports: Capabilities, titles: readonly string[]): void {
  const groups = backendChecks({ create, supports, colwise: 'close' }).filter(({ title }) => titles.includes(title))
  expect(groups).toHaveLength(titles.length)
  for (const { title, checks } of groups) {
    describe(title, () => {
      for (const check of checks) it(check.title, check.run, check.timeoutMs)
    })
  }
}

describe.each(ENGINES)('weights that are computed in bfloat16 on %s', (name) => {
  const wide = normal([12, 20], 1)

  it('are rounded when they are loaded', async () => {
    await using backend = backendOf(await engineOf(name))
    for (const stored of ['float32', 'float16'] as const) {
      const tensor = wide.cast(stored)
      const weight = await backend.loadShard(sourceOf(tensor), { dtype: 'bfloat16' })
      expect(await backend.download(weight)).toEqual(tensor.cast('float32').cast('bfloat16'))
      weight.dispose()
    }
  })

  it('are not those that were loaded to compute in float32, while these may be in bfloat16', async () => {
    await using backend = backendOf(await engineOf(name))
    const linear = (dtype: 'float32' | 'bfloat16') => {
      const types = [
        { dtype, shape: [3, 20] },
        { dtype, shape: [12, 20] },
      ]
      return segmentOf(opGraph('linear', types, {}, [1]))
    }
    const loaded = await backend.loadShard(sourceOf(wide), { dtype: 'float32' })
    await expect(backend.compile(linear('bfloat16'), [loaded])).rejects.toMatchObject({
      code: 'ARGUMENT_MISMATCH',
      actual: { given: 'float32[12, 20]', compiled: 'bfloat16[12, 20]' },
    })
    const rounded = await backend.loadShard(sourceOf(wide), { dtype: 'bfloat16' })
    await (await backend.compile(linear('float32'), [rounded])).dispose()
  })
})

describe.runIf(hasNative)('native, with matrices in bfloat16', () => {
  it.each(['cast', 'stored', 'multiplied'] as const)(
    'holds them in 2 bytes, whatever float32 does: %s',
    async (kept) => {
      await using backend = backendOf(nativeEngine(kept))
      for (const dtype of ['float32', 'bfloat16'] as const) {
        await backend.loadShard(sourceOf(normal([12, 20], 1).cast(dtype)), { dtype: 'bfloat16' })
      }
      expect(backend.memory().weightBytes).toBe(2 * 2 * sizeOf([12, 20]))
    },
  )
})

// 'cast' is what the suite runs on.
describe.runIf(hasNative).each(['stored', 'multiplied'] as const)('native, where float32 has matrices %s', (kept) => {
  const groups = ['weights', 'blocks and a tiny transformer, against torch']
  // Float32 is not exact where it is multiplied in bfloat16.
  class Bfloat16Only extends TfjsBackend {
    override readonly supports: Capabilities = { dtypes: ['bfloat16'] }
  }
  const create = () => {
    const engine = nativeEngine(kept)
    const { name, multipliesBfloat16 } = engine
    return new Bfloat16Only(engine, {
      engine: name,
      float32MatmulPrecision: 'medium',
      multipliesBfloat16,
      rejected: [],
    })
  }
  if (hasNative) defineGroups(create, { dtypes: ['bfloat16'] }, groups)
})

describe.runIf(hasNative)('native, where rounding does not work', () => {
  if (hasNative) {
    defineGroups(() => backendOf(nativeEngine('none')), { dtypes: ['float32'] }, [
      'capabilities',
      'operations in float32',
    ])
  }

  it.each([
    ['cuts off', (bits: number) => bits & 0xffff0000],
    ['rounds ties up', (bits: number) => (bits + 0x8000) & 0xffff0000],
    ['rounds ties down', (bits: number) => (bits + 0x7fff) & 0xffff0000],
    ['keeps float32', (bits: number) => bits],
  ] as const)('is noticed at the start: %s', (_what, round) => {
    const engine = nativeEngine('cast')
    expect(bfloat16Problem(engine)).toBeUndefined()
    engine.roundToBfloat16 = (x) => {
      const words = new Uint32Array((engine.read(x) as Float32Array).slice().buffer)
      return engine.write('float32', x.shape, new Float32Array(words.map(round).buffer))
    }
    expect(bfloat16Problem(engine)).toContain('rounded')
  })
})
