import { defineCollectivesConformance } from '@rankwise/conformance'
import { describe } from 'vitest'

describe.each<[string, string, readonly number[]]>([
  ['shm', 'workers/conformance.ts', [2, 4]],
  ['tcp', 'workers/conformance-tcp.ts', [3]],
])('over %s', (_, worker, worldSizes) => {
  defineCollectivesConformance({ worker: new URL(worker, import.meta.url), worldSizes })
})
