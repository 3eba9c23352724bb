// What the collectives packages share beside the public interface: how an operation is checked and described, how
// tensors are reduced in rank order, how a failure becomes an error, and shared memory. No stable API.
export { type Failure, failureError, nameRanks } from './failure.ts'
export { loadReduce, type Reduce } from './kernel.ts'
export { loadNative, type Native } from './native.ts'
export {
  describeEncoded,
  describeOperation,
  encodeOperation,
  OPERATION_WORDS,
  type Operation,
  requireValid,
} from './operation.ts'
export { SharedMemory } from './shared-memory.ts'
