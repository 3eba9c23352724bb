import { RankwiseError, type Shape, sizeOf, Tensor } from '@rankwise/core'

/** How large pictures are cut into overlapping tiles, by diffusers' names. */
export interface TilingOptions {
  /** Side of a tile in pixels; what is not larger is coded in one piece. @default sampleSize of the config */
  readonly tileSampleMinSize?: number
  /** Part of a tile's side that it shares with the next tile, in [0, 1). @default 0.25 */
  readonly tileOverlapFactor?: number
}

/** Tiling that is on. */
export interface Tiling extends Required<TilingOptions> {
  /** Side of a tile in latents. */
  readonly tileLatentMinSize: number
}

/** How one direction cuts its input and joins its output, along both axes alike. */
export interface TileGrid {
  /** Side of a tile, in elements of the input. */
  readonly tileSize: number
  /** From one tile to the next, in elements of the input. */
  readonly stride: number
  /** What a tile shares with the one before, in elements of the output. */
  readonly blendExtent: number
  /** What is kept of a tile, from its upper left, in elements of the output. */
  readonly rowLimit: number
}

/** Where a tile lies in the input. */
export interface Tile {
  readonly row: number
  readonly column: number
  readonly top: number
  readonly left: number
  readonly height: number
  readonly width: number
}

const OPTIONS: readonly string[] = ['tileSampleMinSize', 'tileOverlapFactor'] satisfies (keyof TilingOptions)[]

/**
 * Options with their defaults. Tiles and overlaps have to be whole latents: diffusers would give a picture of another
 * size otherwise.
 *
 * @param scale - pixels per latent
 * @throws RankwiseError `OPTION_UNKNOWN`, `OPTION_INVALID`
 */
export function resolveTiling(options: TilingOptions, sampleSize: number, scale: number): Tiling {
  const unknown = Object.keys(options).find((name) => !OPTIONS.includes(name))
  if (unknown !== undefined) {
    throw new RankwiseError('OPTION_UNKNOWN', `there is no option '${unknown}'`, {
      where: 'enableTiling',
      actual: { known: OPTIONS },
    })
  }
  const { tileSampleMinSize = sampleSize, tileOverlapFactor = 0.25 } = options
  const isSize = Number.isSafeInteger(tileSampleMinSize) && tileSampleMinSize > 0 && tileSampleMinSize % scale === 0
  if (!isSize) {
    throw invalid({ tileSampleMinSize }, `tileSampleMinSize is a positive multiple of the ${scale} pixels of a latent`)
  }
  if (!(tileOverlapFactor >= 0 && tileOverlapFactor < 1)) {
    throw invalid({ tileOverlapFactor }, 'tileOverlapFactor is in [0, 1)')
  }
  const tiling = { tileSampleMinSize, tileOverlapFactor, tileLatentMinSize: tileSampleMinSize / scale }
  const [decode, encode] = [decodeGrid(tiling), encodeGrid(tiling)]
  const isWhole = decode.rowLimit === decode.stride * scale && encode.stride === encode.rowLimit * scale
  if (decode.stride > 0 && isWhole) return tiling
  throw invalid(
    { tileSampleMinSize, tileOverlapFactor, overlap: tileSampleMinSize * tileOverlapFactor },
    `tileSampleMinSize * tileOverlapFactor is a multiple of the ${scale} pixels of a latent`,
  )
}

function invalid(actual: Readonly<Record<string, unknown>>, rule: string): RankwiseError {
  return new RankwiseError('OPTION_INVALID', 'pictures cannot be cut into such tiles', {
    where: 'enableTiling',
    actual,
    rule,
  })
}

/** From latents to pixels. */
export function decodeGrid({ tileSampleMinSize, tileLatentMinSize, tileOverlapFactor }: Tiling): TileGrid {
  return gridOf(tileLatentMinSize, tileSampleMinSize, tileOverlapFactor)
}

/** From pixels to latents. */
export function encodeGrid({ tileSampleMinSize, tileLatentMinSize, tileOverlapFactor }: Tiling): TileGrid {
  return gridOf(tileSampleMinSize, tileLatentMinSize, tileOverlapFactor)
}

function gridOf(inputSize: number, outputSize: number, overlapFactor: number): TileGrid {
  const blendExtent = Math.trunc(outputSize * overlapFactor)
  return {
    tileSize: inputSize,
    stride: Math.trunc(inputSize * (1 - overlapFactor)),
    blendExtent,
    rowLimit: outputSize - blendExtent,
  }
}

/** Whether an input `[batch, channels, height, width]` is larger than one tile. */
export function needsTiles({ shape }: Tensor, { tileSize }: TileGrid): boolean {
  return (shape[2] as number) > tileSize || (shape[3] as number) > tileSize
}

/** The tiles of an input `[batch, channels, height, width]`, row by row. Those at its end may be smaller. */
export function tilesOf(shape: Shape, { tileSize, stride }: TileGrid): Tile[] {
  const [, , height, width] = shape as [number, number, number, number]
  const starts = (length: number) => Array.from({ length: Math.ceil(length / stride) }, (_, i) => i * stride)
  return starts(height).flatMap((top, row) =>
    starts(width).map((left, column) => ({
      row,
      column,
      top,
      left,
      height: Math.min(tileSize, height - top),
      width: Math.min(tileSize, width - left),
    })),
  )
}

/** All of an input `[batch, channels, height, width]` as one tile. */
export function wholeTile(shape: Shape): Tile {
  return { row: 0, column: 0, top: 0, left: 0, height: shape[2] as number, width: shape[3] as number }
}

/** The part of `[batch, channels, height, width]` under a tile, as a copy. */
export function cutTile(input: Tensor, { top, left, height, width }: Tile): Tensor {
  const [batch, channels, inputHeight, inputWidth] = input.shape as [number, number, number, number]
  const result = Tensor.zeros(input.dtype, [batch, channels, height, width])
  const [source, target] = [input.data as Float32Array, result.data as Float32Array]
  for (let line = 0; line < sizeOf([batch, channels, height]); line++) {
    const from = (Math.floor(line / height) * inputHeight + top + (line % height)) * inputWidth + left
    target.set(source.subarray(from, from + width), line * width)
  }
  return result
}
