import { RankwiseError } from './errors.ts'
import type { Shape } from './tensor.ts'

/** Every rank holds the whole value. */
export interface Replicated {
  readonly kind: 'replicated'
}

/**
 * Every rank holds its part of `dim`. The dimension is a row of blocks (q, k, v, gate, up, …) that are split one by
 * one, so a rank holds the same fraction of each: with blocks `[4, 8]` and 2 ranks, rank 0 has elements 0-1 and 4-7.
 */
export interface Shard {
  readonly kind: 'shard'
  readonly dim: number
  /** Absolute sizes; their sum is the size of `dim`. A plain shard has one block. */
  readonly blocks: readonly number[]
}

/** Every rank holds a summand of the whole shape; the value is their sum. */
export interface Partial {
  readonly kind: 'partial'
}

/** How one value lies over the ranks of a tensor-parallel group. */
export type Placement = Replicated | Shard | Partial

/** The placement of what every rank holds whole. */
export const REPLICATED: Replicated = { kind: 'replicated' }
/** The placement of what has to be summed over the ranks. */
export const PARTIAL: Partial = { kind: 'partial' }

/** The placement that splits `dim` into parts of each block. */
export function shard(dim: number, blocks: readonly number[]): Shard {
  return { kind: 'shard', dim, blocks }
}

/** Whether a value placed one way lies as one placed the other way. */
export function samePlacement(a: Placement, b: Placement): boolean {
  if (a.kind !== 'shard' || b.kind !== 'shard') return a.kind === b.kind
  return a.dim === b.dim && sameBlocks(a.blocks, b.blocks)
}

/** Whether two dimensions consist of the same blocks. */
export function sameBlocks(a: readonly number[], b: readonly number[]): boolean {
  return a.length === b.length && a.every((size, i) => size === b[i])
}

/** `replicated`, `partial(sum)`, `shard(2)`, or with several blocks `shard(2: 64|64|192)`. */
export function formatPlacement(placement: Placement): string {
  if (placement.kind === 'replicated') return 'replicated'
  if (placement.kind === 'partial') return 'partial(sum)'
  const blocks = placement.blocks.length > 1 ? `: ${placement.blocks.join('|')}` : ''
  return `shard(${placement.dim}${blocks})`
}

/** The part of `shape` that one of `tpDegree` ranks holds. */
export function localShape(shape: Shape, placement: Placement, tpDegree: number): Shape {
  if (placement.kind !== 'shard') return shape
  return shape.map((size, dim) => (dim === placement.dim ? size / tpDegree : size))
}

/** Half-open index ranges along one dimension, ascending; their concatenation is a rank's shard. */
export interface ShardSlices {
  readonly dim: number
  readonly ranges: readonly (readonly [start: number, end: number])[]
}

/**
 * Which rows or columns of a tensor belong to `rank`; `undefined` when it holds all of it. Loading, tests and reports
 * all ask this one function.
 *
 * @throws RankwiseError `BLOCK_NOT_DIVISIBLE` when a block does not split evenly.
 */
export function shardSlices(placement: Placement, rank: number, tpDegree: number): ShardSlices | undefined {
  if (placement.kind !== 'shard' || tpDegree === 1) return undefined
  const ranges: [number, number][] = []
  let offset = 0
  for (const size of placement.blocks) {
    if (size % tpDegree !== 0) {
      throw new RankwiseError('BLOCK_NOT_DIVISIBLE', `a block of ${size} cannot be split over ${tpDegree} ranks`, {
        actual: { block: size, blocks: placement.blocks, tpDegree },
        rule: 'every block is divisible by the tensor-parallel degree',
      })
    }
    const part = size / tpDegree
    ranges.push([offset + rank * part, offset + (rank + 1) * part])
    offset += size
  }
  return { dim: placement.dim, ranges }
}
