import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { askProgram } from './ask-program.ts'
import type { Engine, Found } from './engine.ts'
import { findMpirun, mpirun } from './mpirun.ts'

const SOURCE = fileURLToPath(new URL('openmpi.c', import.meta.url))

const CHUNK_BYTES = 2 ** 22
const TCP = ['--mca', 'btl', 'self,tcp', '--mca', 'btl_tcp_if_include', 'lo']

/**
 * Open MPI from C: over shared memory, with all bytes in one call and in chunks, and over TCP, as between machines.
 *
 * @param folder where the program is compiled
 */
export function findOpenMpi(folder: string, source = SOURCE): Found {
  const launcher = findMpirun()
  if ('missing' in launcher) return launcher
  const program = join(folder, 'openmpi')
  const compiled = askProgram('mpicc', ['-O2', '-o', program, source])
  if ('missing' in compiled) return compiled
  const engine = (name: Engine['name'], chunkBytes: number, options: readonly string[] = []) => ({
    name,
    commands: async (ranks: number, plans: readonly string[]) => {
      const rank = { file: program, args: [String(chunkBytes), ...plans] }
      const all = Array.from({ length: ranks }, () => rank)
      return [mpirun(all, options)]
    },
  })
  const engines = [
    engine('openmpi', Number.MAX_SAFE_INTEGER),
    { ...engine('openmpi chunked', CHUNK_BYTES), leastBytes: CHUNK_BYTES + 1 },
    engine('openmpi tcp', CHUNK_BYTES, TCP),
  ]
  return { engines, about: launcher.version }
}
