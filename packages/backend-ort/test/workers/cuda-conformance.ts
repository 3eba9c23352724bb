import '@rankwise/collectives-local'
import { runBackendRank } from '@rankwise/conformance/ranks'
import { fakeBackend } from '../cuda/fake-cuda.ts'

runBackendRank({ create: () => fakeBackend() })
