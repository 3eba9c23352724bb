import { registerCollectives } from '@rankwise/core'
import { ncclCollectives } from './factory.ts'

export type { DeviceBuffer } from './device-buffer.ts'
export { type NcclCollectivesOptions, ncclCollectives } from './factory.ts'
export type { LibraryPaths } from './library.ts'
export type { DeviceOptions, NcclCollectives } from './nccl-collectives.ts'

registerCollectives('nccl', ncclCollectives)
