import { Module, ModuleList, type TracedTensor } from '@rankwise/core'
import { Attention } from './attention.ts'
import { ResnetBlock2D } from './resnet-block.ts'

/** The lowest resolution of encoder and decoder: a resnet block, attention if the config has it, a resnet block. */
export class UNetMidBlock2D extends Module {
  readonly attentions: ModuleList<Attention>
  readonly resnets: ModuleList<ResnetBlock2D>

  constructor(channels: number, groups: number, addAttention: boolean) {
    super()
    this.attentions = new ModuleList(addAttention ? [new Attention(channels, groups)] : [])
    this.resnets = new ModuleList([0, 1].map(() => new ResnetBlock2D(channels, channels, groups)))
  }

  /** `[batch, channels, height, width]` to the same. */
  override forward(x: TracedTensor): TracedTensor {
    let hidden = this.resnets.at(0).call(x)
    for (const attention of this.attentions) hidden = attention.call(hidden)
    return this.resnets.at(1).call(hidden)
  }
}
