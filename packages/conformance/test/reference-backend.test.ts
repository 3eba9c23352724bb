import type { Capabilities } from '@rankwise/core'
import { ReferenceBackend } from '@rankwise/core/reference'
import { defineChecks } from '../src/check.ts'
import { backendChecks } from '../src/index.ts'

// In this process only: the collectives that processes need are not below this package.

const ALL: Capabilities = { dtypes: ['float32', 'float64', 'bfloat16', 'float16'] }
const HALVES: Capabilities = { dtypes: ['bfloat16', 'float16'] }

/** Computes in 16 bits only. */
class HalfBackend extends ReferenceBackend {
  override readonly supports: Capabilities = HALVES
}

defineChecks('the reference', backendChecks({ create: () => new ReferenceBackend(), supports: ALL }))
defineChecks('the reference in 16 bits', backendChecks({ create: () => new HalfBackend(), supports: HALVES }))
