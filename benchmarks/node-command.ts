import { fileURLToPath } from 'node:url'
import type { RankCommand } from './rank-command.ts'

/** A TypeScript program in Node, with the sources of all packages. */
export function nodeCommand(program: URL, args: readonly string[]): RankCommand {
  return {
    file: process.execPath,
    args: ['--import', 'tsx', '--conditions=@rankwise/source', fileURLToPath(program), ...args],
  }
}
