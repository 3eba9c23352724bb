import type { Capabilities } from '@rankwise/core'
import { ReferenceBackend } from '@rankwise/core/reference'
import { defineBackendConformance } from '../src/index.ts'

defineBackendConformance({ create: () => new ReferenceBackend(), supports: { dtypes: ['float32', 'float64'] } })

const HALVES: Capabilities = { dtypes: ['bfloat16', 'float16'] }

/** Rounds what a segment gives to 16 bits. */
class HalfBackend extends ReferenceBackend {
  override readonly supports: Capabilities = HALVES
}

defineBackendConformance({ create: () => new HalfBackend(), supports: HALVES })
