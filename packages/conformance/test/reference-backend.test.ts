import { ReferenceBackend } from '@rankwise/core/reference'
import { defineBackendConformance } from '../src/index.ts'

defineBackendConformance({ create: () => new ReferenceBackend(), supports: { dtypes: ['float32', 'float64'] } })
