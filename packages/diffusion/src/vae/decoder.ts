import { Conv2d, GroupNorm, Module, ModuleList, type TracedTensor } from '@rankwise/core'
import type { CoderSizes } from './encoder.ts'
import { UNetMidBlock2D } from './mid-block.ts'
import { GROUP_NORM_EPS } from './resnet-block.ts'
import { UpDecoderBlock2D } from './up-block.ts'

/** Latent to image, doubling height and width between every two of its blocks. */
export class Decoder extends Module {
  readonly conv_in: Conv2d
  readonly mid_block: UNetMidBlock2D
  readonly up_blocks: ModuleList<UpDecoderBlock2D>
  readonly conv_norm_out: GroupNorm
  readonly conv_out: Conv2d

  constructor({
    inChannels,
    outChannels,
    blockOutChannels,
    layersPerBlock,
    normNumGroups,
    midBlockAddAttention,
  }: CoderSizes) {
    super()
    const upwards = blockOutChannels.toReversed()
    const [first, last] = [upwards[0], upwards.at(-1)] as [number, number]
    this.conv_in = new Conv2d(inChannels, first, 3, { padding: 1 })
    this.mid_block = new UNetMidBlock2D(first, normNumGroups, midBlockAddAttention)
    this.up_blocks = new ModuleList(
      upwards.map((channels, i) => {
        // One resnet block more than in the encoder: diffusers' `num_layers=layers_per_block + 1`.
        const options = { layers: layersPerBlock + 1, groups: normNumGroups, upsample: i < upwards.length - 1 }
        return new UpDecoderBlock2D(upwards[i - 1] ?? first, channels, options)
      }),
    )
    this.conv_norm_out = new GroupNorm(normNumGroups, last, { eps: GROUP_NORM_EPS })
    this.conv_out = new Conv2d(last, outChannels, 3, { padding: 1 })
  }

  /** `[batch, inChannels, height, width]` to `[batch, outChannels, height * scale, width * scale]`. */
  override forward(z: TracedTensor): TracedTensor {
    let hidden = this.mid_block.call(this.conv_in.call(z))
    for (const block of this.up_blocks) hidden = block.call(hidden)
    return this.conv_out.call(this.conv_norm_out.call(hidden).silu())
  }
}
