import { existsSync } from 'node:fs'
import { fileURLToPath } from 'node:url'
import type { RankCommand } from './rank-command.ts'

/**
 * A program of a rank in Node, as it was built, with the packages as they are published: a loader for TypeScript takes 55 MB
 * of every process.
 *
 * @param program - its source
 * @throws Error when it was not built
 */
export function nodeCommand(program: URL, args: readonly string[]): RankCommand {
  const folder = new URL('./', import.meta.url).href
  const file = fileURLToPath(new URL(`dist/${program.href.slice(folder.length).replace(/ts$/, 'js')}`, folder))
  if (!existsSync(file)) throw new Error(`${file} is missing: run \`pnpm build\` first`)
  return { file: process.execPath, args: [file, ...args] }
}
