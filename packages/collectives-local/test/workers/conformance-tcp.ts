import { runCollectivesRank } from '@rankwise/conformance/ranks'
import { localCollectives } from '../../src/index.ts'

runCollectivesRank((rendezvous) => localCollectives(rendezvous, { transport: 'tcp' }))
