import { spawnSync } from 'node:child_process'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { NO_COMPILER as NO_STUB, Stub } from '../../../collectives-nccl/test/stub.ts'
import { OrtBackend } from '../../src/backend.ts'
import { CudaDevice } from '../../src/cuda/cuda-device.ts'
import { CudaEngine } from '../../src/cuda/cuda-engine.ts'
import { type Addon, libraryPath, loadAddon } from '../../src/engine/addon.ts'

const WRAPPER = fileURLToPath(new URL('ort-wrapper.c', import.meta.url))
/** Names the wrapper in processes that a test starts. */
const WRAPPER_VARIABLE = 'STUB_ORT_WRAPPER'

/** Why a GPU cannot be faked; undefined where it can. */
export const NO_FAKE: string | undefined = whatIsMissing()

function whatIsMissing(): string | undefined {
  if (NO_STUB !== undefined) return NO_STUB
  try {
    loadAddon()
    return undefined
  } catch {
    process.stderr.write('SKIPPED: tests of backend-ort on a GPU that is faked: there is no addon\n')
    return 'there is no addon'
  }
}

/** GPUs in memory of the process, and an ONNX Runtime that takes them for real. */
export class FakeCuda implements Disposable {
  readonly stub: Stub = new Stub()
  readonly wrapper: string = join(this.stub.folder, 'libort-wrapper.so')

  constructor() {
    const flags = ['-shared', '-fPIC', '-O1', '-Wall', '-Wextra', '-Werror', WRAPPER, '-o', this.wrapper, '-ldl']
    const { status, stderr } = spawnSync(process.env.CC ?? 'cc', flags, { encoding: 'utf8' })
    if (status !== 0) throw new Error(`the wrapper of ONNX Runtime does not compile:\n${stderr}`)
  }

  /** Environment of a rank. */
  env(rank: number, log: string): Record<string, string> {
    const own = { STUB_PAGEABLE: '1', STUB_ORT_LIBRARY: libraryPath(), [WRAPPER_VARIABLE]: this.wrapper }
    return { ...this.stub.env(rank, log), ...own }
  }

  [Symbol.dispose](): void {
    this.stub[Symbol.dispose]()
  }
}

/** The addon, which takes the wrapper of the environment for ONNX Runtime. */
export function fakeAddon(changes: Partial<Addon> = {}): Addon {
  const addon = loadAddon()
  const wrapper = process.env[WRAPPER_VARIABLE] as string
  return { ...addon, open: (_library, ...rest) => addon.open(wrapper, ...rest), ...changes }
}

/** A backend on a fake GPU of the environment. */
export async function fakeBackend(deviceId?: number, addon: Addon = fakeAddon()): Promise<OrtBackend> {
  const device = new CudaDevice(await CudaEngine.open({ deviceId }, addon))
  return new OrtBackend(device, { engine: 'capi', device: device.name, rejected: [] })
}
