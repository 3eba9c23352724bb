import { spawnSync } from 'node:child_process'
import { existsSync, mkdtempSync, readFileSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'

const SOURCE = fileURLToPath(new URL('stub/stub.c', import.meta.url))
const COMPILER = process.env.CC ?? 'cc'

/** Why suites that need the stub are skipped; undefined where there is a C compiler. */
export const NO_COMPILER = findCompiler()

function findCompiler(): string | undefined {
  if (process.platform !== 'linux') return 'NCCL exists for Linux only'
  if (spawnSync(COMPILER, ['--version']).status === 0) return undefined
  process.stderr.write(
    `SKIPPED: tests of collectives-nccl against the ABI stub: no C compiler '${COMPILER}' (set CC)\n`,
  )
  return `no C compiler '${COMPILER}'`
}

/** A folder with the compiled stub, the files through which its ranks exchange data, and what they recorded. */
export class Stub implements Disposable {
  readonly folder = mkdtempSync(join(tmpdir(), 'rankwise-nccl-'))
  readonly library = join(this.folder, 'libstub.so')

  constructor() {
    const flags = ['-shared', '-fPIC', '-O2', '-fwrapv', '-Wall', '-Wextra', '-Werror', '-pthread']
    const { status, stderr } = spawnSync(COMPILER, [...flags, SOURCE, '-o', this.library], { encoding: 'utf8' })
    if (status !== 0) throw new Error(`the stub does not compile:\n${stderr}`)
  }

  /** Environment of a rank. */
  env(rank: number, log: string): Record<string, string> {
    return {
      RANKWISE_NCCL_LIBRARY: this.library,
      RANKWISE_CUDART_LIBRARY: this.library,
      STUB_FOLDER: this.folder,
      STUB_LOG: join(this.folder, `${log}.${rank}`),
    }
  }

  /** Calls that a rank made, one a line. */
  calls(rank: number, log: string): string[] {
    const file = join(this.folder, `${log}.${rank}`)
    if (!existsSync(file)) return []
    return readFileSync(file, 'utf8')
      .split('\n')
      .filter((line) => line !== '')
  }

  [Symbol.dispose](): void {
    rmSync(this.folder, { recursive: true, force: true })
  }
}

/** Resources that were taken and not given back, by the pair of functions. */
export function leaks(calls: readonly string[]): Record<string, number> {
  const count = (name: string) => calls.filter((line) => line.split(' ')[0] === name).length
  const differences = PAIRS.map(([take, ...give]) => {
    const given = give.reduce((sum, name) => sum + count(name), 0)
    return [take, count(take) - given] as const
  })
  return Object.fromEntries(differences.filter(([, difference]) => difference !== 0))
}

const PAIRS = [
  ['cudaMalloc', 'cudaFree'],
  ['cudaHostAlloc', 'cudaFreeHost'],
  ['cudaStreamCreateWithFlags', 'cudaStreamDestroy'],
  ['cudaEventCreateWithFlags', 'cudaEventDestroy'],
  ['ncclCommInitRankConfig', 'ncclCommDestroy', 'ncclCommAbort'],
] as const
