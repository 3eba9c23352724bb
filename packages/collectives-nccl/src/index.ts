import { registerCollectives } from '@rankwise/core'
import { ncclCollectives } from './factory.ts'

export type { DeviceBuffer, DeviceOptions } from '@rankwise/core'
export { type NcclCollectivesOptions, ncclCollectives } from './factory.ts'
export type { LibraryPaths } from './library.ts'
export type { NcclCollectives } from './nccl-collectives.ts'

registerCollectives('nccl', ncclCollectives)
