import { Conv2d, Module, ModuleList, type TracedTensor } from '@rankwise/core'
import { ResnetBlock2D } from './resnet-block.ts'

/** Halves height and width. */
export class Downsample2D extends Module {
  readonly conv: Conv2d

  constructor(channels: number) {
    super()
    // Zeros at the bottom and on the right only, as in the original VAE: a symmetric padding would shift the image.
    this.conv = new Conv2d(channels, channels, 3, { stride: 2, padding: [0, 1, 0, 1] })
  }

  /** `[batch, channels, height, width]` to `[batch, channels, height / 2, width / 2]`. */
  override forward(x: TracedTensor): TracedTensor {
    return this.conv.call(x)
  }
}

/** One resolution of the encoder. */
export class DownEncoderBlock2D extends Module {
  readonly resnets: ModuleList<ResnetBlock2D>
  readonly downsamplers: ModuleList<Downsample2D> | undefined

  constructor(
    inChannels: number,
    outChannels: number,
    options: { layers: number; groups: number; downsample: boolean },
  ) {
    super()
    const { layers, groups, downsample } = options
    this.resnets = new ModuleList(
      Array.from(
        { length: layers },
        (_, i) => new ResnetBlock2D(i === 0 ? inChannels : outChannels, outChannels, groups),
      ),
    )
    this.downsamplers = downsample ? new ModuleList([new Downsample2D(outChannels)]) : undefined
  }

  /** `[batch, inChannels, height, width]` to `[batch, outChannels, height, width]`, half as high and wide with `downsample`. */
  override forward(x: TracedTensor): TracedTensor {
    let hidden = x
    for (const resnet of this.resnets) hidden = resnet.call(hidden)
    for (const downsampler of this.downsamplers ?? []) hidden = downsampler.call(hidden)
    return hidden
  }
}
