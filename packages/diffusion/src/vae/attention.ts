import { attention, GroupNorm, Linear, Module, ModuleList, type TracedTensor } from '@rankwise/core'
import { GROUP_NORM_EPS } from './resnet-block.ts'

/** Self-attention between the pixels of a feature map: one head as wide as the channels, with a residual connection. */
export class Attention extends Module {
  readonly group_norm: GroupNorm
  readonly to_q: Linear
  readonly to_k: Linear
  readonly to_v: Linear
  /** A list, because the checkpoint names the projection `to_out.0`; its second entry, a dropout, has no weights. */
  readonly to_out: ModuleList<Linear>

  constructor(channels: number, groups: number) {
    super()
    this.group_norm = new GroupNorm(groups, channels, { eps: GROUP_NORM_EPS })
    this.to_q = new Linear(channels, channels)
    this.to_k = new Linear(channels, channels)
    this.to_v = new Linear(channels, channels)
    this.to_out = new ModuleList([new Linear(channels, channels)])
  }

  /** `[batch, channels, height, width]` to the same. */
  override forward(x: TracedTensor): TracedTensor {
    // [batch, channels, height, width] to [batch, height * width, channels]
    const pixels = this.group_norm.call(x).flatten(2, 3).transpose([0, 2, 1])
    const [q, k, v] = [this.to_q, this.to_k, this.to_v].map((projection) => projection.call(pixels).unsqueeze(2)) as [
      TracedTensor,
      TracedTensor,
      TracedTensor,
    ]
    const mixed = this.to_out.at(0).call(attention(q, k, v).flatten(2, 3))
    return mixed.transpose([0, 2, 1]).reshape(x.shape).add(x)
  }
}
