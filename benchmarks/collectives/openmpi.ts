import { spawnSync } from 'node:child_process'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import type { Engine, Found } from './engine.ts'
import { mpirun } from './mpirun.ts'

const SOURCE = fileURLToPath(new URL('openmpi.c', import.meta.url))

const CHUNK_BYTES = 2 ** 22
const TCP = ['--mca', 'btl', 'self,tcp', '--mca', 'btl_tcp_if_include', 'lo']

/**
 * Open MPI from C: over shared memory, with all bytes in one call and in chunks, and over TCP, as between machines.
 *
 * @param folder where the program is compiled
 */
export function findOpenMpi(folder: string, source = SOURCE): Found {
  const version = ask('mpirun', ['--version'])
  if ('missing' in version) return version
  if (!version.output.includes('Open MPI')) return { missing: `mpirun is not Open MPI's: ${firstLine(version.output)}` }
  const program = join(folder, 'openmpi')
  const compiled = ask('mpicc', ['-O2', '-o', program, source])
  if ('missing' in compiled) return compiled
  const engine = (name: Engine['name'], chunkBytes: number, options: readonly string[] = []) => ({
    name,
    commands: async (ranks: number, plans: readonly string[]) => {
      const rank = { file: program, args: [String(chunkBytes), ...plans] }
      return [
        mpirun(
          Array.from({ length: ranks }, () => rank),
          options,
        ),
      ]
    },
  })
  const engines = [
    engine('openmpi', Number.MAX_SAFE_INTEGER),
    { ...engine('openmpi chunked', CHUNK_BYTES), leastBytes: CHUNK_BYTES + 1 },
    engine('openmpi tcp', CHUNK_BYTES, TCP),
  ]
  return { engines, about: firstLine(version.output) }
}

function ask(file: string, args: readonly string[]): { readonly output: string } | { readonly missing: string } {
  const { status, error, stdout, stderr } = spawnSync(file, args, { encoding: 'utf8' })
  if (error !== undefined) return { missing: `${file} does not start: ${error.message}` }
  if (status !== 0) return { missing: `${file} fails: ${firstLine(stderr)}` }
  return { output: stdout }
}

function firstLine(text: string): string {
  return text.split('\n', 1)[0] as string
}
