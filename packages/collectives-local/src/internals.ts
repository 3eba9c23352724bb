// What the collectives packages for CPUs share beside the public interface: how tensors are reduced in rank order,
// shared memory, and connections between all ranks that tell which of them are lost. No stable API.
export type { Message } from './connection.ts'
export { GroupState, type GroupStateOptions } from './group-state.ts'
export { loadReduce, type Reduce } from './kernel.ts'
export { LineReader } from './line-reader.ts'
export { Mesh, type PeerAddress } from './mesh.ts'
export { loadNative, type Native } from './native.ts'
export { SharedMemory } from './shared-memory.ts'
