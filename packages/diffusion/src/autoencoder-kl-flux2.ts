import {
  Conv2d,
  type Graph,
  ModelMixin,
  RankwiseError,
  type Shape,
  type Tensor,
  type TracedTensor,
  trace,
} from '@rankwise/core'
import { type LatentStatistics, latentStatistics } from './latents.ts'
import type { LatentDType } from './rounding.ts'
import { BatchNormStatistics } from './vae/batch-norm.ts'
import { type AutoencoderKLFlux2Config, parseAutoencoderKLFlux2Config } from './vae/config.ts'
import { Decoder } from './vae/decoder.ts'
import { Encoder } from './vae/encoder.ts'
import { type AutoencoderRunOptions, runTiles } from './vae/shared-tiles.ts'
import { joinTiles } from './vae/tile-blend.ts'
import {
  cutTile,
  decodeGrid,
  encodeGrid,
  needsTiles,
  resolveTiling,
  type Tile,
  type TileGrid,
  type Tiling,
  type TilingOptions,
  tilesOf,
  wholeTile,
} from './vae/tiling.ts'

/** A token of the transformer is a patch of 2x2 latents; the checkpoint has the statistics of patches. */
const LATENTS_PER_PATCH = 4

/** `[batch, channels, height, width]` */
type TileShape = readonly [batch: number, channels: number, height: number, width: number]

/** A direction of the autoencoder on one input. */
interface CodingWork {
  readonly name: string
  readonly input: Tensor
  readonly grid: TileGrid | undefined
  readonly run: (input: Tensor) => Promise<Tensor>
  readonly outputShape: (input: TileShape) => Shape
}

/** Autoencoder of FLUX.2: images to latents and back. */
export class AutoencoderKLFlux2 extends ModelMixin {
  // A counter of training steps, stored as int64.
  static readonly ignoredWeights: readonly RegExp[] = [/^bn\.num_batches_tracked$/]

  readonly config: AutoencoderKLFlux2Config
  readonly encoder: Encoder
  readonly decoder: Decoder
  readonly quant_conv: Conv2d | undefined
  readonly post_quant_conv: Conv2d | undefined
  readonly bn: BatchNormStatistics
  #tiling: Tiling | undefined

  constructor(config: AutoencoderKLFlux2Config) {
    super()
    const { blockOutChannels, decoderBlockOutChannels, latentChannels } = config
    const moments = 2 * latentChannels
    this.config = config
    this.encoder = new Encoder({ ...config, outChannels: moments })
    this.decoder = new Decoder({
      ...config,
      inChannels: latentChannels,
      blockOutChannels: decoderBlockOutChannels ?? blockOutChannels,
    })
    this.quant_conv = config.useQuantConv ? new Conv2d(moments, moments, 1) : undefined
    this.post_quant_conv = config.usePostQuantConv ? new Conv2d(latentChannels, latentChannels, 1) : undefined
    this.bn = new BatchNormStatistics(LATENTS_PER_PATCH * latentChannels)
  }

  /**
   * Builds the autoencoder that a `config.json` of diffusers describes, without weights.
   *
   * @throws RankwiseError `CONFIG_INVALID`; `CONFIG_UNSUPPORTED` for other blocks, activations and patches
   */
  static fromConfig(config: unknown): AutoencoderKLFlux2 {
    return new AutoencoderKLFlux2(parseAutoencoderKLFlux2Config(config))
  }

  /** Pixels per latent along each side. */
  get vaeScaleFactor(): number {
    return 2 ** (this.config.blockOutChannels.length - 1)
  }

  /** How large pictures are cut into tiles; undefined where they are not. */
  get tiling(): Tiling | undefined {
    return this.#tiling
  }

  /**
   * Codes pictures that are larger than a tile in overlapping tiles, so that memory does not grow with them. Tiles see
   * nothing of each other: the result differs from that of the whole, as diffusers' does.
   *
   * @throws RankwiseError `OPTION_UNKNOWN`, `OPTION_INVALID`
   */
  enableTiling(options: TilingOptions = {}): void {
    this.#tiling = resolveTiling(options, this.config.sampleSize, this.vaeScaleFactor)
  }

  /** Codes pictures in one piece, as is the default. */
  disableTiling(): void {
    this.#tiling = undefined
  }

  /**
   * Latents to images.
   *
   * @param latents - `[batch, latentChannels, height, width]`, cast to the dtype of the model
   * @returns images `[batch, outChannels, height * vaeScaleFactor, width * vaeScaleFactor]`, nominally in [-1, 1] and
   *   not clamped
   * @throws RankwiseError `LATENTS_SHAPE`, `MODEL_NOT_LOADED`, `INPUTS_DIFFER`, `ABORTED`, and those of the backend and
   *   the collectives
   */
  async decode(latents: Tensor, options: AutoencoderRunOptions = {}): Promise<Tensor> {
    requireChannels(latents, this.config.latentChannels, 'LATENTS_SHAPE', 'latents')
    const z = latents.cast(this.dtype)
    const run = async (z: Tensor) => {
      const { sample } = await this.execute('decode', { z }, ({ z }) => ({ sample: this.#decode(z) }), options)
      return sample as Tensor
    }
    const outputShape = ([batch, , height, width]: TileShape): Shape => {
      const scale = this.vaeScaleFactor
      return [batch, this.config.outChannels, height * scale, width * scale]
    }
    const grid = this.#tiling && decodeGrid(this.#tiling)
    return this.#inTiles({ name: 'decode', input: z, grid, run, outputShape }, options)
  }

  /**
   * Images to latents: the mode of the distribution that the encoder gives, so nothing is drawn.
   *
   * @param image - `[batch, inChannels, height, width]` in [-1, 1], cast to the dtype of the model
   * @returns latents `[batch, latentChannels, height / vaeScaleFactor, width / vaeScaleFactor]`
   * @throws RankwiseError `IMAGE_SHAPE`, also for sides that are no multiples of `vaeScaleFactor` where they are cut
   *   into tiles; `MODEL_NOT_LOADED`, `INPUTS_DIFFER`, `ABORTED`, and those of the backend and the collectives
   */
  async encode(image: Tensor, options: AutoencoderRunOptions = {}): Promise<Tensor> {
    requireChannels(image, this.config.inChannels, 'IMAGE_SHAPE', 'image')
    const input = image.cast(this.dtype)
    const run = async (sample: Tensor) => {
      const { mode } = await this.execute('encode', { sample }, ({ sample }) => ({ mode: this.#mode(sample) }), options)
      return mode as Tensor
    }
    const scale = this.vaeScaleFactor
    const outputShape = ([batch, , height, width]: TileShape): Shape => [
      batch,
      this.config.latentChannels,
      height / scale,
      width / scale,
    ]
    const grid = this.#tiling && encodeGrid(this.#tiling)
    if (grid !== undefined && needsTiles(input, grid)) requireWholeLatents(input, scale)
    return this.#inTiles({ name: 'encode', input, grid, run, outputShape }, options)
  }

  /**
   * Mean and standard deviation of the folded latents, by which a pipeline normalises them.
   *
   * @param dtype - of the latents. @default 'float32'
   * @returns both `[4 * latentChannels]`
   * @throws RankwiseError `MODEL_NOT_LOADED`, and those of the backend
   */
  async latentStatistics(dtype: LatentDType = 'float32'): Promise<LatentStatistics> {
    // In the dtype of the model: a backend may hold weights in that of the file, and the root is rounded to it.
    const mean = (await this.weight('bn.running_mean')).cast(this.dtype) as Tensor<LatentDType>
    const variance = (await this.weight('bn.running_var')).cast(this.dtype) as Tensor<LatentDType>
    return latentStatistics(mean, variance, this.config.batchNormEps, dtype)
  }

  /** An image `[batch, inChannels, height, width]` through encoder and decoder. */
  override forward(sample: TracedTensor): TracedTensor {
    return this.#decode(this.#mode(sample))
  }

  override traceExample(): Graph {
    const side = 2 * this.vaeScaleFactor
    const sample = { dtype: 'float32', shape: [1, this.config.inChannels, side, side] } as const
    return trace('AutoencoderKLFlux2.forward', this, { sample }, ({ sample }) => ({ sample: this.forward(sample) }))
  }

  /** Runs in one piece or, where tiling is on and the input larger than a tile, in tiles. */
  async #inTiles({ name, input, grid, run, outputShape }: CodingWork, options: AutoencoderRunOptions): Promise<Tensor> {
    const isCut = grid !== undefined && needsTiles(input, grid)
    const tiles = isCut ? tilesOf(input.shape, grid) : [wholeTile(input.shape)]
    const [batch, channels] = input.shape as TileShape
    const outputs = await runTiles(
      {
        name: `${name} ${isCut ? JSON.stringify(grid) : 'whole'}`,
        input,
        dtype: this.dtype,
        shapes: tiles.map(({ height, width }) => outputShape([batch, channels, height, width])),
        isShared: isCut,
        run: (tile) => run(isCut ? cutTile(input, tiles[tile] as Tile) : input),
      },
      options,
    )
    return isCut ? joinTiles(tiles, outputs, grid) : (outputs[0] as Tensor)
  }

  #decode(z: TracedTensor): TracedTensor {
    return this.decoder.call(this.post_quant_conv?.call(z) ?? z)
  }

  /** The encoder gives mean and log variance of a normal distribution, whose mode is its mean. */
  #mode(sample: TracedTensor): TracedTensor {
    const encoded = this.encoder.call(sample)
    const moments = this.quant_conv?.call(encoded) ?? encoded
    return moments.slice(1, 0, this.config.latentChannels)
  }
}

function requireChannels({ shape }: Tensor, channels: number, code: string, what: string): void {
  if (shape.length === 4 && shape[1] === channels && shape.every((size) => size > 0)) return
  throw new RankwiseError(code, `the ${what} do not fit the autoencoder`, {
    where: 'AutoencoderKLFlux2',
    actual: { shape, channels },
    rule: 'the shape is [batch, channels, height, width]',
  })
}

function requireWholeLatents({ shape }: Tensor, scale: number): void {
  if (shape.slice(2).every((size) => size % scale === 0)) return
  throw new RankwiseError('IMAGE_SHAPE', 'the image cannot be cut into tiles', {
    where: 'AutoencoderKLFlux2',
    actual: { shape },
    rule: `height and width are multiples of the ${scale} pixels of a latent`,
    remedy: 'crop the image, or disableTiling',
  })
}
