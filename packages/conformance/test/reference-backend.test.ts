import type { Capabilities } from '@rankwise/core'
import { ReferenceBackend } from '@rankwise/core/reference'
import { defineChecks } from '../src/check.ts'
import { backendChecks } from '../src/index.ts'

// In this process only: the collectives that processes need are not below this package.

const WHOLE: Capabilities = { dtypes: ['float32', 'float64'] }
const HALVES: Capabilities = { dtypes: ['bfloat16', 'float16'] }

/** Rounds what a segment gives to 16 bits. */
class HalfBackend extends ReferenceBackend {
  override readonly supports: Capabilities = HALVES
}

defineChecks('the reference', backendChecks({ create: () => new ReferenceBackend(), supports: WHOLE }))
defineChecks('the reference in 16 bits', backendChecks({ create: () => new HalfBackend(), supports: HALVES }))
