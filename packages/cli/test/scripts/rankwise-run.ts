import { Command } from 'commander'
import { runCommand } from '../../src/commands/run.ts'

try {
  await new Command('rankwise').enablePositionalOptions().addCommand(runCommand()).parseAsync()
} catch (error) {
  process.stderr.write(`${error instanceof Error ? error.message : error}\n`)
  process.exitCode = 1
}
