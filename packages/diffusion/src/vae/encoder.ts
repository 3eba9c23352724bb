import { Conv2d, GroupNorm, Module, ModuleList, type TracedTensor } from '@rankwise/core'
import { DownEncoderBlock2D } from './down-block.ts'
import { UNetMidBlock2D } from './mid-block.ts'
import { GROUP_NORM_EPS } from './resnet-block.ts'

/** What encoder and decoder are built from. */
export interface CoderSizes {
  readonly inChannels: number
  readonly outChannels: number
  /** Channels of every resolution, from that of the image down. */
  readonly blockOutChannels: readonly number[]
  readonly layersPerBlock: number
  readonly normNumGroups: number
  readonly midBlockAddAttention: boolean
}

/** Image to latent, halving height and width between every two of its blocks. */
export class Encoder extends Module {
  readonly conv_in: Conv2d
  readonly down_blocks: ModuleList<DownEncoderBlock2D>
  readonly mid_block: UNetMidBlock2D
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
    const [first, last] = [blockOutChannels[0], blockOutChannels.at(-1)] as [number, number]
    this.conv_in = new Conv2d(inChannels, first, 3, { padding: 1 })
    this.down_blocks = new ModuleList(
      blockOutChannels.map((channels, i) => {
        const downsample = i < blockOutChannels.length - 1
        const options = { layers: layersPerBlock, groups: normNumGroups, downsample }
        return new DownEncoderBlock2D(blockOutChannels[i - 1] ?? first, channels, options)
      }),
    )
    this.mid_block = new UNetMidBlock2D(last, normNumGroups, midBlockAddAttention)
    this.conv_norm_out = new GroupNorm(normNumGroups, last, { eps: GROUP_NORM_EPS })
    this.conv_out = new Conv2d(last, outChannels, 3, { padding: 1 })
  }

  /** `[batch, inChannels, height, width]` to `[batch, outChannels, height / scale, width / scale]`. */
  override forward(x: TracedTensor): TracedTensor {
    let hidden = this.conv_in.call(x)
    for (const block of this.down_blocks) hidden = block.call(hidden)
    return this.conv_out.call(this.conv_norm_out.call(this.mid_block.call(hidden)).silu())
  }
}
