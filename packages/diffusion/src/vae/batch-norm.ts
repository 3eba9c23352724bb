import { Module, Parameter, RankwiseError } from '@rankwise/core'

/** The statistics of a `BatchNorm2d` without weights, by which latents are normalised channel by channel. */
export class BatchNormStatistics extends Module {
  readonly running_mean: Parameter
  readonly running_var: Parameter

  constructor(channels: number) {
    super()
    this.running_mean = new Parameter([channels])
    this.running_var = new Parameter([channels])
  }

  override forward(): never {
    throw new RankwiseError('BATCH_NORM_FORWARD', 'latents are not normalised by a forward', {
      remedy: 'use latentStatistics of the autoencoder with normalizeLatents and denormalizeLatents',
    })
  }
}
