import { fileURLToPath } from 'node:url'
import { type DType, RankwiseError, type ReduceOp, type TensorData } from '@rankwise/core'
import nodeGypBuild from 'node-gyp-build'
import type { Cursor } from './cursor.ts'
import type { Reduce } from './kernel.ts'

/** The group as the addon knows it. */
export type NativeGroup = { readonly nativeGroup: unique symbol }

/** What native/addon.c exports. Operations return a `status_t` of native/group.h. */
export interface Addon {
  readonly protocol: number
  /** Instruction sets that this processor has code for, the one in use first. */
  readonly instructionSets: readonly string[]
  open(arena: Uint8Array, slotBytes: number, worldSize: number, rank: number, spins: 0 | 1, cursor: Cursor): NativeGroup
  barrier(group: NativeGroup): number
  allReduce(group: NativeGroup, dtype: number, op: number, arrays: readonly TensorData[]): number
  allReduceInPlace(
    group: NativeGroup,
    dtype: number,
    op: number,
    bytes: Uint8Array,
    offset: number,
    byteLength: number,
  ): number
  allGather(group: NativeGroup, input: Uint8Array, output: Uint8Array): number
  reduceScatter(group: NativeGroup, dtype: number, op: number, input: TensorData, output: TensorData): number
  broadcast(group: NativeGroup, source: number, bytes: Uint8Array): number
  /** Reduces with the code for one of `instructionSets`, without a group. */
  reduce(variant: number, dtype: number, op: number, sources: readonly TensorData[], target: TensorData): void
}

/** As PROTOCOL in native/group.h: an addon that was compiled from other sources must not run. */
const PROTOCOL = 2

const DTYPES: readonly DType[] = ['float32', 'float64', 'float16', 'bfloat16', 'int32']
const REDUCE_OPS: readonly ReduceOp[] = ['sum', 'max', 'min']

/** The number by which the addon knows a dtype. */
export function dtypeNumber(dtype: DType): number {
  return DTYPES.indexOf(dtype)
}

/** The number by which the addon knows a reduction. */
export function reduceOpNumber(op: ReduceOp): number {
  return REDUCE_OPS.indexOf(op)
}

/** The reduction of the addon for memory that ranks do not share, with the fastest code that this processor has. */
export function nativeReduce(addon: Addon): Reduce {
  return (dtype, op, sources, target) => addon.reduce(0, dtypeNumber(dtype), reduceOpNumber(op), sources, target)
}

/** @throws RankwiseError `KERNEL_UNAVAILABLE` when there is no addon for this platform, or it does not load. */
export function loadAddon(): Addon {
  const folder = fileURLToPath(new URL('..', import.meta.url))
  try {
    const addon = nodeGypBuild<Addon>(folder)
    if (addon.protocol !== PROTOCOL) throw new Error(`it has protocol ${addon.protocol}, not ${PROTOCOL}`)
    return addon
  } catch (cause) {
    throw new RankwiseError('KERNEL_UNAVAILABLE', 'the native kernel does not load', {
      where: `${folder}prebuilds`,
      actual: { platform: process.platform, arch: process.arch },
      rule: "kernel 'native' needs an addon that was compiled for this platform",
      remedy: "run `node native/build.mjs` in this folder, which needs a C compiler, or choose kernel 'auto'",
      cause,
    })
  }
}
