import { registerCollectives } from '@rankwise/core'
import { mpiCollectives } from './factory.ts'

export { type MpiCollectivesOptions, mpiCollectives } from './factory.ts'

registerCollectives('mpi', mpiCollectives)
