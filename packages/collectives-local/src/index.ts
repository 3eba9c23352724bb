import { registerCollectives } from '@rankwise/core'
import { localCollectives } from './factory.ts'

export { type LocalCollectivesOptions, localCollectives } from './factory.ts'
export type { KernelName } from './kernel.ts'
export type { LocalGroup } from './local-group.ts'
export { SharedTensor } from './shared-tensor.ts'
export type { TransportChoice, TransportName } from './transport.ts'

registerCollectives('local', localCollectives)
