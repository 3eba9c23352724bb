import '@rankwise/collectives-local'
import { runBackendRank } from '@rankwise/conformance/ranks'
import { ort } from '../../src/index.ts'

// All ranks share the first GPU: what is tested is what each computes.
runBackendRank({ create: () => ort({ device: 'cuda', deviceId: 0 }) })
