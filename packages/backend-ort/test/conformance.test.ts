import { defineBackendConformance } from '@rankwise/conformance'
import { ort } from '../src/index.ts'

defineBackendConformance({
  create: () => ort({ device: 'cpu', threads: 1 }),
  supports: { dtypes: ['float32', 'bfloat16'] },
  worker: new URL('workers/conformance.ts', import.meta.url),
})
