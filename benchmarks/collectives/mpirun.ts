import type { RankCommand } from '../rank-command.ts'
import { askProgram, firstLine } from './ask-program.ts'

/** One command line that starts all ranks under Open MPI's mpirun, which refuses root and more ranks than cores by default. */
export function mpirun(ranks: readonly RankCommand[], options: readonly string[] = []): RankCommand {
  const asRoot = process.getuid?.() === 0 ? ['--allow-run-as-root'] : []
  const programs = ranks.flatMap(({ file, args, env = {} }, rank) => [
    ...(rank === 0 ? [] : [':']),
    ...['-np', '1'],
    ...Object.entries(env).flatMap(([name, value]) => ['-x', `${name}=${value}`]),
    file,
    ...args,
  ])
  return { file: 'mpirun', args: [...asRoot, '--oversubscribe', ...options, ...programs] }
}

export function findMpirun(): { readonly version: string } | { readonly missing: string } {
  const answer = askProgram('mpirun', ['--version'])
  if ('missing' in answer) return answer
  const version = firstLine(answer.output)
  return version.includes('Open MPI') ? { version } : { missing: `mpirun is not Open MPI's: ${version}` }
}
