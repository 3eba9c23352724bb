import { defineBackendConformance } from '@rankwise/conformance'
import { afterAll, beforeAll, describe } from 'vitest'
import { FakeCuda, fakeBackend, NO_FAKE } from './fake-cuda.ts'

// All that backends promise, of the code for GPUs: what ONNX Runtime computes is the CPU's. Collectives are not those of GPUs.
describe.skipIf(NO_FAKE !== undefined)('on a fake GPU', () => {
  let fake: FakeCuda
  beforeAll(() => {
    fake = new FakeCuda()
    Object.assign(process.env, fake.env(0, 'conformance'))
  })
  afterAll(() => fake[Symbol.dispose]())

  defineBackendConformance({
    create: () => fakeBackend(),
    supports: { dtypes: ['float32', 'bfloat16'] },
    worker: new URL('../workers/cuda-conformance.ts', import.meta.url),
  })
})
