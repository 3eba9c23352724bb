import { defineCollectivesConformance } from '@rankwise/conformance'

defineCollectivesConformance({ worker: new URL('workers/conformance.ts', import.meta.url) })
