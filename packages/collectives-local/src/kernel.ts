import { type DType, type DTypeArrays, RankwiseError, type ReduceOp } from '@rankwise/core'
import { jsKernel } from './js-kernel.ts'
import { type Addon, loadAddon, nativeReduce } from './native-kernel.ts'
import { loadWasmKernel } from './wasm-kernel.ts'

/** What reduces: compiled C, WebAssembly with SIMD, or JavaScript. */
export type KernelName = 'native' | 'wasm' | 'js'

/**
 * Combines the contributions of all ranks in rank order: ((r0 + r1) + r2) + ..., each step rounded to the dtype, so
 * whoever computes it gets the same bits. 16-bit floats are combined as float32 and rounded once. int32 sums wrap. A NaN
 * of any rank makes the result the NaN without sign and payload, and -0 is less than 0. All arrays have one length; the
 * target may be one of the sources.
 */
export type Reduce = (
  dtype: DType,
  op: ReduceOp,
  sources: readonly DTypeArrays[DType][],
  target: DTypeArrays[DType],
) => void

/** A kernel that is ready. */
export type Kernel =
  | { readonly name: 'native'; readonly addon: Addon }
  | { readonly name: 'wasm' | 'js'; readonly reduce: Reduce }

/** What reduces, and which kernel it is of. */
export interface Reduction {
  readonly name: KernelName
  readonly reduce: Reduce
}

/**
 * Loads the kernel; `auto` takes the first that works here of native, wasm and js. All give the same bits.
 *
 * @throws RankwiseError `KERNEL_UNAVAILABLE` when the kernel that was asked for by name does not work here,
 * `KERNEL_UNKNOWN`
 */
export async function loadKernel(choice: KernelName | 'auto'): Promise<Kernel> {
  if (choice !== 'auto') return load(choice)
  for (const name of ['native', 'wasm'] as const) {
    try {
      return await load(name)
    } catch (error) {
      if (!(error instanceof RankwiseError)) throw error
    }
  }
  return load('js')
}

/** Contributions that the addon reduces outside a group at a time; FEW_PARTS of native/addon.c. */
const MAX_NATIVE_SOURCES = 16

/**
 * A reduction of the contributions of so many ranks, without shared memory.
 *
 * @throws RankwiseError `KERNEL_UNAVAILABLE` beyond 16 ranks, where the native kernel was asked for by name
 */
export async function reductionFor(kernel: Kernel, choice: KernelName | 'auto', ranks: number): Promise<Reduction> {
  if (kernel.name !== 'native') return kernel
  if (ranks <= MAX_NATIVE_SOURCES) return { name: 'native', reduce: nativeReduce(kernel.addon) }
  if (choice === 'auto') return { name: 'wasm', reduce: await loadWasmKernel() }
  throw new RankwiseError('KERNEL_UNAVAILABLE', 'the native kernel does not reduce so many contributions at once', {
    actual: { ranks },
    rule: `without shared memory, kernel 'native' is for at most ${MAX_NATIVE_SOURCES} ranks`,
    remedy: "choose kernel 'auto'",
  })
}

/** The fastest reduction without a group, of arrays of any number of ranks: that of WebAssembly, or else of JavaScript. */
export async function loadReduce(): Promise<Reduce> {
  return loadWasmKernel().catch(() => jsKernel)
}

async function load(name: KernelName): Promise<Kernel> {
  switch (name) {
    case 'native':
      return { name, addon: loadAddon() }
    case 'wasm':
      return { name, reduce: await loadWasmKernel() }
    case 'js':
      return { name, reduce: jsKernel }
    default:
      throw new RankwiseError('KERNEL_UNKNOWN', 'there is no such kernel', {
        actual: { kernel: name },
        rule: "kernel is 'auto', 'native', 'wasm' or 'js'",
      })
  }
}
