import { type DType, type ReduceOp, viewAs } from '@rankwise/core'
import fc from 'fast-check'
import { describe, expect, test } from 'vitest'
import { type KernelName, loadKernel, type Reduce } from '../src/kernel.ts'
import { type Addon, dtypeNumber, reduceOpNumber } from '../src/native-kernel.ts'
import { WASM_MODULE } from '../src/wasm-module.ts'
import { wasmModuleSource } from '../wasm/build.ts'
import { builtAddon } from './built-addon.ts'
import { firstDifference, randomBytes, reduceInOrder } from './oracle.ts'

const DTYPES = ['float32', 'float64', 'float16', 'bfloat16', 'int32'] as const
const OPS = ['sum', 'max', 'min'] as const

const addon = builtAddon()

async function reduceOf(name: KernelName): Promise<Reduce> {
  const kernel = await loadKernel(name)
  if (kernel.name !== 'native') return kernel.reduce
  return nativeReduce(kernel.addon, 0)
}

function nativeReduce({ reduce }: Addon, variant: number): Reduce {
  return (dtype, op, sources, target) => reduce(variant, dtypeNumber(dtype), reduceOpNumber(op), sources, target)
}

const KERNELS: [string, Reduce][] = [
  ['js', await reduceOf('js')],
  ['wasm', await reduceOf('wasm')],
  ...(addon?.instructionSets ?? []).map((name, i): [string, Reduce] => [
    `native ${name}`,
    nativeReduce(addon as Addon, i),
  ]),
]

function contributions(dtype: DType, ranks: number, elements: number, seed: number): Uint8Array[] {
  return Array.from({ length: ranks }, (_, rank) => randomBytes(dtype, elements, seed * 100 + rank))
}

/** The parts as they might lie in memory: not aligned to a vector. */
function reduceAll(reduce: Reduce, dtype: DType, op: ReduceOp, parts: readonly Uint8Array[]): Uint8Array {
  const { length } = parts[0] as Uint8Array
  const unaligned = (part: Uint8Array) => {
    const bytes = new Uint8Array(length + 8).subarray(8)
    bytes.set(part)
    return bytes
  }
  const target = unaligned(new Uint8Array(length))
  reduce(
    dtype,
    op,
    parts.map((part) => viewAs(dtype, unaligned(part))),
    viewAs(dtype, target),
  )
  return target.slice()
}

test.skipIf(addon === undefined)('the native kernel was tested', () => {
  expect(KERNELS.map(([name]) => name)).toContain('native baseline')
})

describe.each(KERNELS)('%s', (_, reduce) => {
  test.each(DTYPES.flatMap((dtype) => OPS.map((op) => [dtype, op] as const)))(
    '%s %s equals the sequential computation in rank order, bit for bit',
    (dtype, op) => {
      fc.assert(
        fc.property(
          fc.integer({ min: 2, max: 8 }),
          fc.integer({ min: 0, max: 9000 }),
          fc.nat(1e6),
          (ranks, size, seed) => {
            const parts = contributions(dtype, ranks, size, seed)
            const expected = reduceInOrder(dtype, op, parts)
            expect(firstDifference(dtype, reduceAll(reduce, dtype, op, parts), expected)).toBeUndefined()
          },
        ),
        { numRuns: 10 },
      )
    },
  )

  test.each(['float16', 'bfloat16'] as const)('every %s there is, with its neighbours', (dtype) => {
    const all = Uint16Array.from({ length: 2 ** 16 }, (_, bits) => bits)
    const parts = [0, 1, 2 ** 15].map((shift) => new Uint8Array(all.map((bits) => bits + shift).buffer))
    for (const op of OPS) {
      const expected = reduceInOrder(dtype, op, parts)
      expect(firstDifference(dtype, reduceAll(reduce, dtype, op, parts), expected)).toBeUndefined()
    }
  })

  test.each([0, 1, 2])('the result may lie over the contribution of rank %i', (rank) => {
    for (const dtype of DTYPES) {
      const parts = contributions(dtype, 3, 10_001, 1)
      const expected = reduceInOrder(dtype, 'sum', parts)
      const arrays = parts.map((part) => viewAs(dtype, part))
      reduce(dtype, 'sum', arrays, arrays[rank] as (typeof arrays)[0])
      expect(firstDifference(dtype, parts[rank] as Uint8Array, expected)).toBeUndefined()
    }
  })
})

describe('the comparison can fail', () => {
  const [, reduce] = KERNELS[0] as [string, Reduce]
  const parts = contributions('float32', 3, 1000, 7)
  const expected = reduceInOrder('float32', 'sum', parts)
  const difference = (others: readonly Uint8Array[]) =>
    firstDifference('float32', reduceAll(reduce, 'float32', 'sum', others), expected)

  test('another order of the ranks is found', () => {
    const [a, b, c] = parts as [Uint8Array, Uint8Array, Uint8Array]
    expect(difference([c, b, a])).toBeDefined()
  })

  test('a skipped rank is found', () => expect(difference(parts.slice(0, 2))).toBeDefined())

  test('rounding after every rank instead of once is found', () => {
    const halves = contributions('bfloat16', 3, 1000, 7)
    const [a, b, c] = halves as [Uint8Array, Uint8Array, Uint8Array]
    const twice = reduceInOrder('bfloat16', 'sum', [reduceInOrder('bfloat16', 'sum', [a, b]), c])
    expect(firstDifference('bfloat16', reduceAll(reduce, 'bfloat16', 'sum', halves), twice)).toBeDefined()
  })

  test('another NaN is found', () => {
    const bits = new Uint32Array([0x7fc00000, 0xffc00000])
    const [one, other] = [new Uint8Array(bits.buffer, 0, 4), new Uint8Array(bits.buffer, 4, 4)]
    expect(firstDifference('float32', one, other)).toBe(0)
  })
})

describe('choice', () => {
  test('auto takes the fastest that there is', async () => {
    expect((await loadKernel('auto')).name).toBe(addon === undefined ? 'wasm' : 'native')
  })

  test('a kernel that does not exist is refused', async () => {
    await expect(loadKernel('fortran' as 'js')).rejects.toMatchObject({ code: 'KERNEL_UNKNOWN' })
  })
})

test('the WebAssembly module is the one that its source gives', async () => {
  expect(await wasmModuleSource()).toContain(`'${WASM_MODULE.slice(0, 100)}'`)
  const lines = (await wasmModuleSource()).matchAll(/^ {2}'(.*)',$/gm)
  expect([...lines].map(([, line]) => line).join('')).toBe(WASM_MODULE)
})
