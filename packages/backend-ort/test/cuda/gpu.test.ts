import { defineBackendConformance } from '@rankwise/conformance'
import { describe } from 'vitest'
import { ort } from '../../src/index.ts'

/** Why nothing is run on a GPU; undefined where there is one. */
const NO_GPU = await whatIsMissing()

async function whatIsMissing(): Promise<string | undefined> {
  try {
    await (await ort({ device: 'cuda' })).dispose()
    return undefined
  } catch (error) {
    const [reason] = (error as Error).message.split('\n', 1)
    process.stderr.write(`SKIPPED: tests of backend-ort on a GPU: ${reason}\n`)
    return reason
  }
}

describe.skipIf(NO_GPU !== undefined)('on a GPU', () => {
  defineBackendConformance({
    create: () => ort({ device: 'cuda' }),
    supports: { dtypes: ['float32', 'bfloat16'] },
    colwise: 'close',
    worker: new URL('../workers/gpu-conformance.ts', import.meta.url),
  })
})
