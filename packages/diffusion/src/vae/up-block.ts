import { Conv2d, Module, ModuleList, type TracedTensor, upsampleNearest2d } from '@rankwise/core'
import { ResnetBlock2D } from './resnet-block.ts'

/** Doubles height and width. */
export class Upsample2D extends Module {
  readonly conv: Conv2d

  constructor(channels: number) {
    super()
    this.conv = new Conv2d(channels, channels, 3, { padding: 1 })
  }

  /** `[batch, channels, height, width]` to `[batch, channels, 2 * height, 2 * width]`. */
  override forward(x: TracedTensor): TracedTensor {
    return this.conv.call(upsampleNearest2d(x, 2))
  }
}

/** One resolution of the decoder. */
export class UpDecoderBlock2D extends Module {
  readonly resnets: ModuleList<ResnetBlock2D>
  readonly upsamplers: ModuleList<Upsample2D> | undefined

  constructor(inChannels: number, outChannels: number, options: { layers: number; groups: number; upsample: boolean }) {
    super()
    const { layers, groups, upsample } = options
    this.resnets = new ModuleList(
      Array.from(
        { length: layers },
        (_, i) => new ResnetBlock2D(i === 0 ? inChannels : outChannels, outChannels, groups),
      ),
    )
    this.upsamplers = upsample ? new ModuleList([new Upsample2D(outChannels)]) : undefined
  }

  /** `[batch, inChannels, height, width]` to `[batch, outChannels, height, width]`, twice as high and wide with `upsample`. */
  override forward(x: TracedTensor): TracedTensor {
    let hidden = x
    for (const resnet of this.resnets) hidden = resnet.call(hidden)
    for (const upsampler of this.upsamplers ?? []) hidden = upsampler.call(hidden)
    return hidden
  }
}
