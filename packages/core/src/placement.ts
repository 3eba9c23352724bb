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
  /**
   * Heads of which `dim` consists and which are not cut: where there are more ranks than heads, neighbouring ranks hold
   * the same one. Left out, no two ranks hold the same elements.
   */
  readonly heads?: number
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
export function shard(dim: number, blocks: readonly number[], heads?: number): Shard {
  return heads === undefined ? { kind: 'shard', dim, blocks } : { kind: 'shard', dim, blocks, heads }
}

/** Into how many different parts a shard is dealt out: one for every rank, unless there are fewer heads. */
export function partsOf({ heads = Number.POSITIVE_INFINITY }: Shard, tpDegree: number): number {
  return Math.min(heads, tpDegree)
}

/** The part that a rank holds, counted from 0. */
export function partOf(placement: Shard, rank: number, tpDegree: number): number {
  return Math.floor((rank * partsOf(placement, tpDegree)) / tpDegree)
}

/** A placement without what makes no difference at a degree: heads that no ranks share. */
export function atDegree(placement: Placement, tpDegree: number): Placement {
  if (placement.kind !== 'shard' || isShared(placement, tpDegree)) return placement
  return shard(placement.dim, placement.blocks)
}

/** Whether several ranks hold the same part of a value. */
export function isShared(placement: Placement, tpDegree: number): boolean {
  return placement.kind === 'shard' && partsOf(placement, tpDegree) < tpDegree
}

/** Whether ranks can share heads evenly: each has whole ones, or one that as many ranks have as any other. */
export function headsDivide(heads: number, tpDegree: number): boolean {
  return heads % tpDegree === 0 || tpDegree % heads === 0
}

/** Whether a value placed one way lies as one placed the other way. */
export function samePlacement(a: Placement, b: Placement): boolean {
  if (a.kind !== 'shard' || b.kind !== 'shard') return a.kind === b.kind
  return a.dim === b.dim && sameBlocks(a, b)
}

/** Whether two dimensions consist of the same blocks, and of the same heads where ranks share these. */
export function sameBlocks(a: Omit<Shard, 'dim'>, b: Omit<Shard, 'dim'>): boolean {
  return a.heads === b.heads && a.blocks.length === b.blocks.length && a.blocks.every((size, i) => size === b.blocks[i])
}

/** `replicated`, `partial(sum)`, `shard(2)`, with several blocks `shard(2: 64|64|192)`, with heads `shard(2, 8 heads)`. */
export function formatPlacement(placement: Placement): string {
  if (placement.kind === 'replicated') return 'replicated'
  if (placement.kind === 'partial') return 'partial(sum)'
  const blocks = placement.blocks.length > 1 ? `: ${placement.blocks.join('|')}` : ''
  const heads = placement.heads === undefined ? '' : `, ${placement.heads} heads`
  return `shard(${placement.dim}${blocks}${heads})`
}

/** The part of `shape` that one of `tpDegree` ranks holds. */
export function localShape(shape: Shape, placement: Placement, tpDegree: number): Shape {
  if (placement.kind !== 'shard') return shape
  return shape.map((size, dim) => (dim === placement.dim ? size / partsOf(placement, tpDegree) : size))
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
 * @throws RankwiseError `BLOCK_NOT_DIVISIBLE` when a block does not split evenly, `HEADS_NOT_DIVISIBLE` when heads do not.
 */
export function shardSlices(placement: Placement, rank: number, tpDegree: number): ShardSlices | undefined {
  if (placement.kind !== 'shard' || tpDegree === 1) return undefined
  const { heads = tpDegree } = placement
  if (!headsDivide(heads, tpDegree)) {
    throw new RankwiseError('HEADS_NOT_DIVISIBLE', `${heads} heads cannot be shared by ${tpDegree} ranks`, {
      actual: { heads, tpDegree },
      rule: 'the number of heads is divisible by the tensor-parallel degree, or divides it',
    })
  }
  const [parts, index] = [partsOf(placement, tpDegree), partOf(placement, rank, tpDegree)]
  const ranges: [number, number][] = []
  let offset = 0
  for (const size of placement.blocks) {
    if (size % parts !== 0) {
      throw new RankwiseError('BLOCK_NOT_DIVISIBLE', `a block of ${size} cannot be split into ${parts} parts`, {
        actual: { block: size, blocks: placement.blocks, tpDegree },
        rule: 'every block is divisible by the tensor-parallel degree',
      })
    }
    const part = size / parts
    ranges.push([offset + index * part, offset + (index + 1) * part])
    offset += size
  }
  return { dim: placement.dim, ranges }
}
