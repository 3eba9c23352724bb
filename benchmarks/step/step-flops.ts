import { opDefinition } from '@rankwise/core'
import { Flux2Transformer2DModel } from '@rankwise/models-flux2'
import type { Tokens } from './job.ts'

/** Floating-point operations of a step of a transformer; a multiply-add counts as 2. */
export function stepFlops(config: object, { image, text }: Tokens): number {
  const { nodes } = Flux2Transformer2DModel.fromConfig(config).trace({ imageTokens: image, textTokens: text })
  return nodes.reduce(
    (sum, { op, inputs, outputs, attributes }) => sum + opDefinition(op).cost(inputs, outputs, attributes).flops,
    0,
  )
}
