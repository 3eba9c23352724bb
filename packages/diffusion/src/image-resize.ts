import { CHANNELS, type Pixels } from './image-pixels.ts'

/** Lobes of the Lanczos kernel on either side. */
const LOBES = 3

/**
 * Fractional bits of Pillow's fixed-point weights for 8-bit images: of 32 bits, 8 hold the sample and 2 what the
 * negative lobes of the kernel overshoot.
 */
const FRACTION_BITS = 32 - 8 - 2

/** What sums begin with, so that dropping their fraction rounds. */
const HALF = 1 << (FRACTION_BITS - 1)

/** Weights of the source pixels of every target pixel along one axis. */
interface Weights {
  /** First source pixel of each target pixel. */
  readonly first: Int32Array
  /** Number of source pixels of each. */
  readonly count: Int32Array
  /** Fixed-point weights, `stride` for each. */
  readonly values: Int32Array
  readonly stride: number
}

/**
 * Another size by Lanczos resampling, bit for bit as `resize(size, LANCZOS)` of Pillow 13: when it gets smaller the
 * kernel grows with the scale, weights are fixed-point, and the result of the first pass is rounded to 8 bits.
 */
export function resizeLanczos(pixels: Pixels, width: number, height: number): Pixels {
  // Pillow 13 begins with the columns where that is less work (its pull request 9549), others always with the rows. It
  // matters: where the kernel overshoots, the first pass cuts off other values, on noise up to 45 levels.
  const columnsFirst = height < pixels.height && pixels.height - height > 2 * (pixels.width - width)
  return columnsFirst
    ? resizeRows(resizeColumns(pixels, height), width)
    : resizeColumns(resizeRows(pixels, width), height)
}

function resizeRows({ width: from, height, data }: Pixels, width: number): Pixels {
  if (width === from) return { width, height, data }
  const { first, count, values, stride } = weightsOf(from, width)
  const result = new Uint8Array(width * height * CHANNELS)
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      let source = (y * from + (first[x] as number)) * CHANNELS
      const end = x * stride + (count[x] as number)
      let [red, green, blue] = [HALF, HALF, HALF]
      for (let tap = x * stride; tap < end; tap++) {
        const weight = values[tap] as number
        red = (red + Math.imul(data[source++] as number, weight)) | 0
        green = (green + Math.imul(data[source++] as number, weight)) | 0
        blue = (blue + Math.imul(data[source++] as number, weight)) | 0
      }
      const target = (y * width + x) * CHANNELS
      result[target] = toByte(red)
      result[target + 1] = toByte(green)
      result[target + 2] = toByte(blue)
    }
  }
  return { width, height, data: result }
}

function resizeColumns({ width, height: from, data }: Pixels, height: number): Pixels {
  if (height === from) return { width, height, data }
  const { first, count, values, stride } = weightsOf(from, height)
  const rowSize = width * CHANNELS
  const result = new Uint8Array(rowSize * height)
  const sums = new Int32Array(rowSize)
  for (let y = 0; y < height; y++) {
    sums.fill(HALF)
    for (let tap = 0; tap < (count[y] as number); tap++) {
      const weight = values[y * stride + tap] as number
      const source = ((first[y] as number) + tap) * rowSize
      for (let x = 0; x < rowSize; x++) {
        sums[x] = (sums[x] as number) + Math.imul(data[source + x] as number, weight)
      }
    }
    for (let x = 0; x < rowSize; x++) result[y * rowSize + x] = toByte(sums[x] as number)
  }
  return { width, height, data: result }
}

function toByte(sum: number): number {
  return Math.min(Math.max(sum >> FRACTION_BITS, 0), 255)
}

function weightsOf(from: number, to: number): Weights {
  const scale = from / to
  const filterScale = Math.max(scale, 1)
  const support = LOBES * filterScale
  const stride = Math.ceil(support) * 2 + 1
  const [first, count, values] = [new Int32Array(to), new Int32Array(to), new Int32Array(to * stride)]
  for (let i = 0; i < to; i++) {
    const center = (i + 0.5) * scale
    const begin = Math.max(Math.trunc(center - support + 0.5), 0)
    const end = Math.min(Math.trunc(center + support + 0.5), from)
    const weights = Array.from({ length: end - begin }, (_, tap) =>
      lanczos((tap + begin - center + 0.5) * (1 / filterScale)),
    )
    const total = weights.reduce((sum, weight) => sum + weight, 0)
    first[i] = begin
    count[i] = end - begin
    for (const [tap, weight] of weights.entries()) values[i * stride + tap] = toFixedPoint(weight / total)
  }
  return { first, count, values, stride }
}

/** Rounded to nearest, halves away from zero. */
function toFixedPoint(weight: number): number {
  return Math.trunc(weight * 2 ** FRACTION_BITS + (weight < 0 ? -0.5 : 0.5))
}

function lanczos(x: number): number {
  return x >= -LOBES && x < LOBES ? sinc(x) * sinc(x / LOBES) : 0
}

function sinc(x: number): number {
  return x === 0 ? 1 : Math.sin(x * Math.PI) / (x * Math.PI)
}
