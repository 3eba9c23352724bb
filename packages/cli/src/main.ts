#!/usr/bin/env node
import { RankwiseError } from '@rankwise/core'
import { Command } from 'commander'
import packageJson from '../package.json' with { type: 'json' }
import { generateCommand } from './commands/generate.ts'
import { planCommand } from './commands/plan.ts'
import { runCommand } from './commands/run.ts'

const program = new Command('rankwise')
  .description('Tensor parallelism for diffusion transformers')
  .version(packageJson.version)
  // What follows the script of `run` belongs to the script.
  .enablePositionalOptions()
  .addCommand(generateCommand())
  .addCommand(planCommand())
  .addCommand(runCommand())

// Whoever reads the output may stop before its end, as `head` does.
process.stdout.on('error', (error: NodeJS.ErrnoException) => process.exit(error.code === 'EPIPE' ? 0 : 1))

try {
  await program.parseAsync()
} catch (error) {
  process.stderr.write(`${describe(error)}\n`)
  process.exitCode = 1
}

/** Errors that we throw on purpose explain themselves; a stack would bury that. */
function describe(error: unknown): string {
  if (error instanceof RankwiseError) return error.message
  return error instanceof Error && error.stack !== undefined ? error.stack : String(error)
}
