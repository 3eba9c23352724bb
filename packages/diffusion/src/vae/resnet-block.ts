import { Conv2d, GroupNorm, Module, type TracedTensor } from '@rankwise/core'

/** Epsilon of every group norm of the autoencoder; diffusers fixes it in `Encoder` and `Decoder`. */
export const GROUP_NORM_EPS = 1e-6

/** Two convolutions with a residual connection. */
export class ResnetBlock2D extends Module {
  readonly norm1: GroupNorm
  readonly conv1: Conv2d
  readonly norm2: GroupNorm
  readonly conv2: Conv2d
  /** Brings the residual to `outChannels`; undefined where it already has them. */
  readonly conv_shortcut: Conv2d | undefined

  constructor(inChannels: number, outChannels: number, groups: number) {
    super()
    this.norm1 = new GroupNorm(groups, inChannels, { eps: GROUP_NORM_EPS })
    this.conv1 = new Conv2d(inChannels, outChannels, 3, { padding: 1 })
    this.norm2 = new GroupNorm(groups, outChannels, { eps: GROUP_NORM_EPS })
    this.conv2 = new Conv2d(outChannels, outChannels, 3, { padding: 1 })
    this.conv_shortcut = inChannels === outChannels ? undefined : new Conv2d(inChannels, outChannels, 1)
  }

  /** `[batch, inChannels, height, width]` to `[batch, outChannels, height, width]`. */
  override forward(x: TracedTensor): TracedTensor {
    const middle = this.conv1.call(this.norm1.call(x).silu())
    const residual = this.conv_shortcut?.call(x) ?? x
    return residual.add(this.conv2.call(this.norm2.call(middle).silu()))
  }
}
