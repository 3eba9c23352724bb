import { raiseStacks } from './koffi-stacks.ts'

export { type MpiCollectivesOptions, mpiCollectives } from './factory.ts'

raiseStacks()
