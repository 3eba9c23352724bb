import { allocate, RankwiseError, type Shape, sizeOf, Tensor } from '@rankwise/core'
import { type LatentDType, roundingOf } from './rounding.ts'

/** Side of the square of VAE latents that FLUX.2 folds into one token. */
const PATCH = 2

/** Per-channel mean and standard deviation of the latents, both `[channels]`. */
export interface LatentStatistics {
  readonly mean: Tensor<LatentDType>
  readonly std: Tensor<LatentDType>
}

/**
 * Latents as the tokens of a transformer, row by row.
 *
 * @param latents `[batch, channels, height, width]`
 * @returns `[batch, height * width, channels]`
 * @throws RankwiseError `LATENTS_SHAPE`
 */
export function packLatents<D extends LatentDType>(latents: Tensor<D>): Tensor<D> {
  const [batch, channels, height, width] = imageShape(latents)
  return permute(latents, [batch, channels, height * width], [0, 2, 1])
}

/**
 * Undoes `packLatents`.
 *
 * @param tokens `[batch, height * width, channels]`
 * @returns `[batch, channels, height, width]`
 * @throws RankwiseError `LATENTS_SHAPE`
 */
export function unpackLatents<D extends LatentDType>(tokens: Tensor<D>, height: number, width: number): Tensor<D> {
  const [batch = 0, length, channels = 0] = tokens.shape
  if (tokens.shape.length !== 3 || length !== height * width) {
    throw shapeError(
      'tokens do not fill the image',
      { shape: tokens.shape, height, width },
      'the shape is [batch, height * width, channels]',
    )
  }
  return permute(tokens, [batch, length, channels], [0, 2, 1]).reshape([batch, channels, height, width])
}

/**
 * Folds every 2x2 square of latents into channels; channel `c * 4 + dy * 2 + dx` holds row `dy`, column `dx` of it.
 *
 * @param latents `[batch, channels, height, width]` with even sides
 * @returns `[batch, channels * 4, height / 2, width / 2]`
 * @throws RankwiseError `LATENTS_SHAPE`
 */
export function patchifyLatents<D extends LatentDType>(latents: Tensor<D>): Tensor<D> {
  const [batch, channels, height, width] = imageShape(latents)
  if (height % PATCH !== 0 || width % PATCH !== 0) {
    throw shapeError('latents cannot be folded', { shape: latents.shape }, 'height and width are even')
  }
  const rows = height / PATCH
  const columns = width / PATCH
  // [b, c, h, dy, w, dx] -> [b, c, dy, dx, h, w]
  const folded = permute(latents, [batch, channels, rows, PATCH, columns, PATCH], [0, 1, 3, 5, 2, 4])
  return folded.reshape([batch, channels * PATCH * PATCH, rows, columns])
}

/**
 * Undoes `patchifyLatents`.
 *
 * @param latents `[batch, channels * 4, height, width]`
 * @returns `[batch, channels, height * 2, width * 2]`
 * @throws RankwiseError `LATENTS_SHAPE`
 */
export function unpatchifyLatents<D extends LatentDType>(latents: Tensor<D>): Tensor<D> {
  const [batch, folded, height, width] = imageShape(latents)
  if (folded % (PATCH * PATCH) !== 0) {
    throw shapeError('latents cannot be unfolded', { shape: latents.shape }, 'the number of channels divides by 4')
  }
  const channels = folded / (PATCH * PATCH)
  // [b, c, dy, dx, h, w] -> [b, c, h, dy, w, dx]
  const spread = permute(latents, [batch, channels, PATCH, PATCH, height, width], [0, 1, 4, 2, 5, 3])
  return spread.reshape([batch, channels, height * PATCH, width * PATCH])
}

/**
 * Statistics of a VAE's batch norm, `std = sqrt(runningVar + eps)`, rounded in the dtype of the VAE and then to that of
 * the latents. The root is correctly rounded. torch's own comes from a vector library and is up to one unit in the last
 * place off, for 0.6 % or 18 % of the float32 values on the two CPUs measured.
 *
 * @param runningMean `[channels]`
 * @param runningVar `[channels]`
 * @param eps `batch_norm_eps` of the VAE's config
 * @param dtype dtype of the latents
 */
export function latentStatistics(
  runningMean: Tensor<LatentDType>,
  runningVar: Tensor<LatentDType>,
  eps: number,
  dtype: LatentDType,
): LatentStatistics {
  const round = roundingOf(runningVar.dtype)
  const shift = Math.fround(eps)
  const std = runningVar.cast('float32').data.map((variance) => round(Math.sqrt(round(variance + shift))))
  return { mean: runningMean.cast(dtype), std: Tensor.float32(runningVar.shape, std).cast(dtype) }
}

/**
 * `latents * std + mean` for each channel: from what the transformer knows to what the VAE decodes.
 *
 * @param latents `[batch, channels, height, width]`
 * @throws RankwiseError `LATENTS_SHAPE`
 */
export function denormalizeLatents<D extends LatentDType>(latents: Tensor<D>, statistics: LatentStatistics): Tensor<D> {
  const round = roundingOf(latents.dtype)
  return mapChannels(latents, statistics, (value, mean, std) => round(round(value * std) + mean))
}

/**
 * `(latents - mean) / std` for each channel: undoes `denormalizeLatents`.
 *
 * @param latents `[batch, channels, height, width]`
 * @throws RankwiseError `LATENTS_SHAPE`
 */
export function normalizeLatents<D extends LatentDType>(latents: Tensor<D>, statistics: LatentStatistics): Tensor<D> {
  const round = roundingOf(latents.dtype)
  return mapChannels(latents, statistics, (value, mean, std) => round(round(value - mean) / std))
}

/** Positions (T, H, W, L) of text tokens, (0, 0, 0, l): `[length, 4]`. */
export function prepareTextIds(length: number): Tensor<'int32'> {
  const ids = Tensor.zeros('int32', [length, 4])
  for (let l = 0; l < length; l++) ids.data[l * 4 + 3] = l
  return ids
}

/** Positions (T, H, W, L) of image tokens in the order of `packLatents`, (0, h, w, 0): `[height * width, 4]`. */
export function prepareLatentIds(height: number, width: number): Tensor<'int32'> {
  const ids = Tensor.zeros('int32', [height * width, 4])
  for (let token = 0; token < height * width; token++)
    ids.data.set([0, Math.floor(token / width), token % width], token * 4)
  return ids
}

function mapChannels<D extends LatentDType>(
  latents: Tensor<D>,
  { mean, std }: LatentStatistics,
  map: (value: number, mean: number, std: number) => number,
): Tensor<D> {
  const [, channels, height, width] = imageShape(latents)
  if (mean.data.length !== channels || std.data.length !== channels) {
    throw shapeError(
      'the statistics are for other latents',
      { shape: latents.shape, mean: mean.shape, std: std.shape },
      'mean and std have one value for each channel',
    )
  }
  const means = mean.cast('float32').data
  const stds = std.cast('float32').data
  const values = latents.cast('float32').data.map((value, i) => {
    const channel = Math.floor(i / (height * width)) % channels
    return map(value, means[channel] as number, stds[channel] as number)
  })
  return Tensor.float32(latents.shape, values).cast(latents.dtype)
}

/** The elements read as `shape` with its axes in another order: axis i of the result is axis `order[i]` of `shape`. */
function permute<D extends LatentDType>(tensor: Tensor<D>, shape: Shape, order: readonly number[]): Tensor<D> {
  const sizes = order.map((axis) => shape[axis] as number)
  const steps = order.map((axis) => sizeOf(shape.slice(axis + 1)))
  const source: Float32Array | Uint16Array = tensor.data
  const data = allocate(tensor.dtype, source.length)
  const target: Float32Array | Uint16Array = data
  const position = sizes.map(() => 0)
  let from = 0
  for (let to = 0; to < target.length; to++) {
    target[to] = source[from] as number
    for (let axis = sizes.length - 1; axis >= 0; axis--) {
      from += steps[axis] as number
      position[axis] = (position[axis] as number) + 1
      if (position[axis] !== sizes[axis]) break
      from -= (steps[axis] as number) * (sizes[axis] as number)
      position[axis] = 0
    }
  }
  return new Tensor(tensor.dtype, sizes, data)
}

function imageShape({ shape }: Tensor): [batch: number, channels: number, height: number, width: number] {
  const [batch, channels, height, width, ...rest] = shape
  if (batch === undefined || channels === undefined || height === undefined || width === undefined || rest.length > 0) {
    throw shapeError('not a batch of latents', { shape }, 'the shape is [batch, channels, height, width]')
  }
  return [batch, channels, height, width]
}

function shapeError(what: string, actual: Readonly<Record<string, unknown>>, rule: string): RankwiseError {
  return new RankwiseError('LATENTS_SHAPE', what, { actual, rule })
}
