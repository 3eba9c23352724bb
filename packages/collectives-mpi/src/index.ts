import { registerCollectives } from '@rankwise/core'
import { mpiCollectives } from './factory.ts'
import { raiseStacks } from './koffi-stacks.ts'

export { type MpiCollectivesOptions, mpiCollectives } from './factory.ts'

raiseStacks()
registerCollectives('mpi', mpiCollectives)
