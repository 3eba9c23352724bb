import '@rankwise/collectives-local'
import { runBackendRank } from '@rankwise/conformance/ranks'
import { ort } from '../../src/index.ts'

runBackendRank({ create: () => ort({ device: 'cpu', threads: 1 }) })
