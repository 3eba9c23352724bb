import { defineBackendConformance } from '@rankwise/conformance'
import { tfjs } from '../src/index.ts'

defineBackendConformance({
  create: () => tfjs({ engine: 'wasm' }),
  supports: { dtypes: ['float32', 'bfloat16'] },
  worker: new URL('workers/conformance-wasm.ts', import.meta.url),
})
