import { defineBackendConformance } from '@rankwise/conformance'
import { describe } from 'vitest'
import { tfjs } from '../src/index.ts'
import { hasNative } from './engines.ts'

describe.runIf(hasNative)('native', () => {
  defineBackendConformance({
    create: () => tfjs({ engine: 'native', threads: 1 }),
    supports: { dtypes: ['float32', 'bfloat16'] },
    worker: new URL('workers/conformance-native.ts', import.meta.url),
  })
})
