import '@rankwise/collectives-local'
import { runBackendRank } from '@rankwise/conformance/ranks'
import { tfjs } from '../../src/index.ts'

runBackendRank({ create: () => tfjs({ engine: 'wasm', threads: 1 }) })
