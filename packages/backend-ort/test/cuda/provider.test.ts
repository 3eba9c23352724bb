import { existsSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { expect, it, onTestFinished } from 'vitest'
import { CudaEngine } from '../../src/cuda/cuda-engine.ts'
import { libraryPath, loadAddon } from '../../src/engine/addon.ts'
import { FakeCuda, NO_FAKE } from './fake-cuda.ts'

const hasProvider = existsSync(join(dirname(libraryPath()), 'libonnxruntime_providers_shared.so'))

// The functions of the table are where our header says: options are made and set, and the provider is asked for by its file.
it.skipIf(NO_FAKE !== undefined || hasProvider)(
  'the library of onnxruntime-node misses the files of its CUDA provider',
  async () => {
    const fake = new FakeCuda()
    onTestFinished(() => fake[Symbol.dispose]())
    Object.assign(process.env, fake.env(0, 'provider'))
    await expect(CudaEngine.open({}, loadAddon())).rejects.toMatchObject({
      code: 'ORT_CUDA',
      message: expect.stringMatching(/Failed to load library .*libonnxruntime_providers_shared\.so/),
      remedy: expect.stringContaining('--onnxruntime-node-install=cuda12'),
    })
  },
)
