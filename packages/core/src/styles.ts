import { RankwiseError } from './errors.ts'
import type { Embedding } from './nn/embedding.ts'
import type { Linear } from './nn/linear.ts'
import { type Placement, REPLICATED, shard } from './placement.ts'
import { jsonOf } from './value-text.ts'

/** Column-wise with several fused projections in one weight; each is split by itself. */
export interface PackedColwise {
  readonly kind: 'packed_colwise'
  readonly blocks: readonly number[] | undefined
}

/** Row-wise for an input that joins several values; each is split by itself. */
export interface PackedRowwise {
  readonly kind: 'packed_rowwise'
  readonly blocks: readonly number[] | undefined
}

/** Column-wise for heads that are not cut: where there are more ranks, several hold the same one. */
export interface ColwiseHeads {
  readonly kind: 'colwise_heads'
  readonly heads: number | undefined
}

/**
 * How a plan splits a Linear or, `colwise` only, an Embedding.
 *
 * - `colwise`: output features are dealt out; the input is replicated.
 * - `rowwise`: input features are dealt out; the output is a partial sum.
 * - `rowwise_split_input`: rowwise for a replicated input, which every rank slices for itself.
 * - `packedColwise(blocks?)`, `packedRowwise(blocks?)`: the same for fused projections.
 * - `colwiseHeads(heads?)`: colwise for keys and values that queries share, which may be fewer than ranks.
 *
 * A `colwise` Embedding deals out the columns of its table, whatever the number of entries; its output is a partial sum.
 */
export type ParallelStyle = 'colwise' | 'rowwise' | 'rowwise_split_input' | PackedColwise | PackedRowwise | ColwiseHeads

/**
 * A style for one weight that fuses several column-wise projections.
 *
 * @param blocks - proportional integers whose sum divides the rows of the weight (`[1, 1]` for gate and up);
 *   omitted, the Linear's own `packedColBlocks`
 */
export function packedColwise(blocks?: readonly number[]): PackedColwise {
  return { kind: 'packed_colwise', blocks }
}

/**
 * A style for a row-wise weight whose input joins several values.
 *
 * @param blocks - proportional integers whose sum divides the columns of the weight; omitted, the Linear's own
 *   `packedRowBlocks`
 */
export function packedRowwise(blocks?: readonly number[]): PackedRowwise {
  return { kind: 'packed_rowwise', blocks }
}

/**
 * A style for the projection to keys or values of grouped-query attention.
 *
 * @param heads - number of heads that the rows of the weight are; omitted, the Linear's own `heads`
 */
export function colwiseHeads(heads?: number): ColwiseHeads {
  return { kind: 'colwise_heads', heads }
}

/** How one weight is held by a rank. */
export interface ParameterPlacement {
  readonly placement: Placement
  /** Whether a replicated input is sliced for this row-wise weight. */
  readonly splitInput: boolean
}

/** Placements of a Linear's weight and bias under a style. */
export interface LinearPlacement {
  readonly weight: ParameterPlacement
  readonly bias: ParameterPlacement
}

const REPLICATED_PARAMETER: ParameterPlacement = { placement: REPLICATED, splitInput: false }

/**
 * @param path - module path, for errors
 * @throws RankwiseError `STYLE_UNKNOWN`, `PACKED_BLOCKS_MISSING`, `PACKED_BLOCKS_SUM`, `STYLE_HEADS`
 */
export function placeLinear(style: ParallelStyle, linear: Linear, path: string): LinearPlacement {
  const [rows, columns] = linear.weight.shape as readonly [number, number]
  if (style === 'colwise') return colwise([rows])
  if (style === 'rowwise') return rowwise([columns], false)
  if (style === 'rowwise_split_input') return rowwise([columns], true)
  if (isKind(style, 'packed_colwise')) {
    return colwise(blockSizes(rows, style.blocks ?? linear.packedColBlocks, path, 'packedColBlocks'))
  }
  if (isKind(style, 'packed_rowwise')) {
    return rowwise(blockSizes(columns, style.blocks ?? linear.packedRowBlocks, path, 'packedRowBlocks'), false)
  }
  if (isKind(style, 'colwise_heads')) return colwise([rows], headCount(rows, style.heads ?? linear.heads, path))
  throw new RankwiseError('STYLE_UNKNOWN', `unknown parallel style ${jsonOf(style)}`, {
    where: path,
    rule: `a style is ${STYLES}`,
  })
}

const STYLES =
  'colwise, rowwise, rowwise_split_input, packedColwise(blocks?), packedRowwise(blocks?) or colwiseHeads(heads?)'

/**
 * Placement of an Embedding's table. Ranks have columns of it, because numbers of entries are often odd.
 *
 * @throws RankwiseError `STYLE_EMBEDDING`
 */
export function placeEmbedding(style: ParallelStyle, { weight }: Embedding, path: string): ParameterPlacement {
  if (style === 'colwise') return { placement: shard(1, [weight.shape[1] as number]), splitInput: false }
  throw new RankwiseError('STYLE_EMBEDDING', 'an embedding is not split like that', {
    where: path,
    actual: { style: typeof style === 'string' ? style : style.kind },
    rule: "the style of an embedding is 'colwise'",
  })
}

function isKind<K extends string>(style: unknown, kind: K): style is Extract<ParallelStyle, { kind: K }> {
  return typeof style === 'object' && style !== null && 'kind' in style && style.kind === kind
}

function colwise(blocks: readonly number[], heads?: number): LinearPlacement {
  const rows = { placement: shard(0, blocks, heads), splitInput: false }
  return { weight: rows, bias: rows }
}

/** @throws RankwiseError `STYLE_HEADS` */
function headCount(rows: number, heads: number | undefined, path: string): number {
  if (heads !== undefined && Number.isInteger(heads) && heads > 0 && rows % heads === 0) return heads
  throw new RankwiseError('STYLE_HEADS', `${rows} rows are not ${heads ?? 'an unknown number of'} heads`, {
    where: path,
    actual: { rows, heads },
    rule: "the number of heads comes from the style or from the Linear's heads, and divides the rows of its weight",
  })
}

function rowwise(blocks: readonly number[], splitInput: boolean): LinearPlacement {
  return { weight: { placement: shard(1, blocks), splitInput }, bias: REPLICATED_PARAMETER }
}

/** Absolute block sizes of a packed dimension from proportional integers. */
function blockSizes(
  size: number,
  blocks: readonly number[] | undefined,
  path: string,
  property: 'packedColBlocks' | 'packedRowBlocks',
): readonly number[] {
  if (blocks === undefined || blocks.length === 0) {
    throw new RankwiseError('PACKED_BLOCKS_MISSING', 'a packed style has no blocks', {
      where: path,
      rule: `blocks come from the style or from the Linear's ${property}`,
      remedy: `pass blocks to the style, or ${property} to the Linear`,
    })
  }
  const sum = blocks.reduce((total, block) => total + block, 0)
  if (blocks.some((block) => !Number.isInteger(block) || block <= 0) || size % sum !== 0) {
    throw new RankwiseError('PACKED_BLOCKS_SUM', `${size} cannot be split in the proportions ${blocks.join(':')}`, {
      where: path,
      actual: { size, blocks, sum },
      rule: 'blocks are positive integers whose sum divides the packed dimension',
    })
  }
  return blocks.map((block) => (block * size) / sum)
}
