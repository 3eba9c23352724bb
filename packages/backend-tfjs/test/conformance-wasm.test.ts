import { defineBackendConformance } from '@rankwise/conformance'
import { tfjs } from '../src/index.ts'

defineBackendConformance({
  create: () => tfjs({ engine: 'wasm' }),
  worker: new URL('workers/conformance-wasm.ts', import.meta.url),
})
