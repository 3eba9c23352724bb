import { defineBackendConformance } from '@rankwise/conformance'
import { LoopBackend } from '../custom-backend/backend.ts'

defineBackendConformance({
  create: () => new LoopBackend(),
  supports: { dtypes: ['float32'] },
  worker: new URL('workers/custom-backend.ts', import.meta.url),
})
