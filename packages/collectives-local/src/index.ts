import { registerCollectives } from '@rankwise/core'
import { localCollectives } from './factory.ts'

export { type LocalCollectivesOptions, localCollectives } from './factory.ts'

registerCollectives('local', localCollectives)
