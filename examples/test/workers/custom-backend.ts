import '@rankwise/collectives-local'
import { runBackendRank } from '@rankwise/conformance/ranks'
import { LoopBackend } from '../../custom-backend/backend.ts'

runBackendRank({ create: () => new LoopBackend() })
