import exif from 'exif-reader'
import { CHANNELS, type Pixels } from './image-pixels.ts'

/** Orientations of EXIF: 1 is upright, 5 to 8 lie on their side. */
type Orientation = 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8

/**
 * The orientation that EXIF data asks for. Upright where it says none or cannot be read: cameras write broken EXIF data
 * around good pictures.
 *
 * @param data - from its byte order mark or from `Exif\0\0` on; undefined where a file has none
 */
export function exifOrientation(data: Uint8Array | undefined): Orientation {
  if (data === undefined) return 1
  try {
    const value = exif(Buffer.from(data.buffer, data.byteOffset, data.byteLength)).Image?.Orientation
    return isOrientation(value) ? value : 1
  } catch {
    return 1
  }
}

function isOrientation(value: unknown): value is Orientation {
  return Number.isInteger(value) && (value as number) >= 1 && (value as number) <= 8
}

/** The picture as it is meant to be seen, as Pillow's `ImageOps.exif_transpose` turns it. */
export function orient(pixels: Pixels, orientation: Orientation): Pixels {
  if (orientation === 1) return pixels
  const { width, height, data } = pixels
  const [columns, rows] = orientation >= 5 ? [height, width] : [width, height]
  const { first, right, down } = walk(orientation, width, height)
  const result = new Uint8Array(data.length)
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const from = (first + row * down + column * right) * CHANNELS
      const to = (row * columns + column) * CHANNELS
      for (let channel = 0; channel < CHANNELS; channel++) result[to + channel] = data[from + channel] as number
    }
  }
  return { width: columns, height: rows, data: result }
}

/** Where the upright picture begins in the stored one, and how far apart its columns and rows lie there, in pixels. */
function walk(orientation: Orientation, width: number, height: number) {
  const fromRight = [2, 3, 7, 8].includes(orientation)
  const fromBottom = [3, 4, 6, 7].includes(orientation)
  const first = (fromBottom ? (height - 1) * width : 0) + (fromRight ? width - 1 : 0)
  const alongRow = fromRight ? -1 : 1
  const alongColumn = fromBottom ? -width : width
  return orientation >= 5
    ? { first, right: alongColumn, down: alongRow }
    : { first, right: alongRow, down: alongColumn }
}
