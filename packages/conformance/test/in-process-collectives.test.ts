import { defineChecks } from '../src/check.ts'
import { failureGroup, operationGroups } from '../src/collectives/checks.ts'
import { launchInProcess } from '../src/ranks/launch-in-process.ts'

const subject = { launch: launchInProcess(), sums: 'rank-order', worldSizes: [1, 2, 3] } as const

defineChecks('collectives of one process', [...operationGroups(subject), failureGroup(subject, { processes: false })])
