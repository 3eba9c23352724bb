#!/usr/bin/env node
import { RankwiseError } from '@rankwise/core'
import { Command } from 'commander'
import packageJson from '../package.json' with { type: 'json' }
import { generateCommand } from './commands/generate.ts'
import { planCommand } from './commands/plan.ts'
import { runCommand } from './commands/run.ts'
import { Interrupted } from './interrupt.ts'

const program = new Command('rankwise')
  .description('Tensor parallelism for diffusion transformers')
  .version(packageJson.version)
  // What follows the script of `run` belongs to the script.
  .enablePositionalOptions()
  .addCommand(generateCommand())
  .addCommand(planCommand())
  .addCommand(runCommand())

try {
  await program.parseAsync()
} catch (error) {
  process.stderr.write(`${describe(error)}\n`)
  process.exitCode = error instanceof Interrupted ? error.exitCode : 1
}

/** Errors that we throw on purpose explain themselves; a stack would bury that. */
function describe(error: unknown): string {
  if (error instanceof RankwiseError || error instanceof Interrupted) return error.message
  return error instanceof Error && error.stack !== undefined ? error.stack : String(error)
}
