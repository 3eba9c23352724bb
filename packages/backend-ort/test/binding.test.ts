// The tests of what an engine computes, on the one that is there where the other is not.
import { ENGINE_VARIABLE } from '../src/engine/engine-selection.ts'

process.env[ENGINE_VARIABLE] = 'binding'
await import('./backend.test.ts')
await import('./block.test.ts')
await import('./conformance.test.ts')
await import('./stored-weights.test.ts')
