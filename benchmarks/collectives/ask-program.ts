import { spawnSync } from 'node:child_process'

/** What a program printed, or why it could not. */
export type Answer = { readonly output: string } | { readonly missing: string }

/** Runs a program to the end, to learn whether it is there and what it says of itself. */
export function askProgram(file: string, args: readonly string[]): Answer {
  const { status, error, stdout, stderr } = spawnSync(file, args, { encoding: 'utf8' })
  if (error !== undefined) return { missing: `${file} does not start: ${error.message}` }
  if (status !== 0) return { missing: `${file} fails: ${firstLine(stderr)}` }
  return { output: stdout }
}

export function firstLine(text: string): string {
  return text.split('\n', 1)[0] as string
}
