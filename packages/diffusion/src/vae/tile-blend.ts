import { sizeOf, Tensor } from '@rankwise/core'
import { type LatentDType, roundingOf } from '../rounding.ts'
import type { Tile, TileGrid } from './tiling.ts'

/** Values of a tile's output `[planes, height, width]`, in float32. */
interface Block {
  readonly planes: number
  readonly height: number
  readonly width: number
  readonly data: Float32Array
}

type Rounding = (value: number) => number

/**
 * Joins the outputs of tiles into one. Where tiles overlap, the upper and then the left one fades into the next, in the
 * order of diffusers: a tile that was faded into is what the next ones fade from.
 *
 * @param tiles - in the order of `tilesOf`
 * @param outputs - of the same order, each `[batch, channels, height, width]`; taken over
 */
export function joinTiles(
  tiles: readonly Tile[],
  outputs: readonly Tensor[],
  { blendExtent, rowLimit }: TileGrid,
): Tensor {
  const { dtype, shape } = outputs[0] as Tensor
  const round = roundingOf(dtype as LatentDType)
  const blocks = outputs.map(toBlock)
  const columns = tiles.filter(({ row }) => row === 0).length
  for (const [i, block] of blocks.entries()) {
    const { row, column } = tiles[i] as Tile
    if (row > 0) fadeRows(blocks[i - columns] as Block, block, blendExtent, round)
    if (column > 0) fadeColumns(blocks[i - 1] as Block, block, blendExtent, round)
  }
  const kept = (length: number) => Math.min(length, rowLimit)
  const height = blocks.reduce((sum, block, i) => (i % columns === 0 ? sum + kept(block.height) : sum), 0)
  const width = blocks.slice(0, columns).reduce((sum, block) => sum + kept(block.width), 0)
  const [batch, channels] = shape as [number, number]
  const joined = { planes: batch * channels, height, width, data: new Float32Array(batch * channels * height * width) }
  for (const [i, block] of blocks.entries()) {
    const { row, column } = tiles[i] as Tile
    place(block, joined, { top: row * rowLimit, left: column * rowLimit, limit: rowLimit })
  }
  return Tensor.float32([batch, channels, height, width], joined.data).cast(dtype)
}

function toBlock(tensor: Tensor): Block {
  const [, , height, width] = tensor.shape as [number, number, number, number]
  return { planes: sizeOf(tensor.shape.slice(0, 2)), height, width, data: tensor.cast('float32').data }
}

/** The last rows of `above` fade into the first of `below`. */
function fadeRows(above: Block, below: Block, extent: number, round: Rounding): void {
  const rows = Math.min(above.height, below.height, extent)
  for (let plane = 0; plane < below.planes; plane++) {
    for (let y = 0; y < rows; y++) {
      const [leaving, coming] = shares(y, rows)
      const from = (plane * above.height + above.height - rows + y) * above.width
      const to = (plane * below.height + y) * below.width
      for (let x = 0; x < below.width; x++) fade(above, from + x, below, to + x, leaving, coming, round)
    }
  }
}

/** The last columns of `left` fade into the first of `right`. */
function fadeColumns(left: Block, right: Block, extent: number, round: Rounding): void {
  const columns = Math.min(left.width, right.width, extent)
  for (let line = 0; line < right.planes * right.height; line++) {
    for (let x = 0; x < columns; x++) {
      const [leaving, coming] = shares(x, columns)
      const from = (line + 1) * left.width - columns + x
      fade(left, from, right, line * right.width + x, leaving, coming, round)
    }
  }
}

/** What is left of the one, and what is there of the other, as torch casts them: to float32. */
function shares(step: number, steps: number): readonly [leaving: number, coming: number] {
  return [Math.fround(1 - step / steps), Math.fround(step / steps)]
}

function fade(
  source: Block,
  from: number,
  target: Block,
  to: number,
  leaving: number,
  coming: number,
  round: Rounding,
): void {
  const old = round((source.data[from] as number) * leaving)
  const fresh = round((target.data[to] as number) * coming)
  target.data[to] = round(old + fresh)
}

/** Copies the upper left of a tile's output to its place. */
function place(
  block: Block,
  joined: Block,
  at: { readonly top: number; readonly left: number; readonly limit: number },
) {
  const rows = Math.min(block.height, at.limit)
  const columns = Math.min(block.width, at.limit)
  for (let plane = 0; plane < block.planes; plane++) {
    for (let y = 0; y < rows; y++) {
      const from = (plane * block.height + y) * block.width
      const to = (plane * joined.height + at.top + y) * joined.width + at.left
      joined.data.set(block.data.subarray(from, from + columns), to)
    }
  }
}
