import { statSync } from 'node:fs'
import { resolve } from 'node:path'
import { RankwiseError } from '@rankwise/core'
import { Command } from 'commander'
import { launch } from '../launcher.ts'
import { integer } from '../parse-options.ts'

interface RunOptions {
  readonly nprocPerNode: number
  readonly nnodes: number
  readonly nodeRank: number
  readonly masterAddr?: string
  readonly masterPort?: number
  readonly maxRestarts: number
  readonly timeout?: number
  readonly prefix: boolean
  readonly inheritRank0?: true
}

/** `rankwise run`: one process per rank. The parent command needs `enablePositionalOptions()`. */
export function runCommand(): Command {
  return new Command('run')
    .description('run a script as several ranks, on this machine or on several, as torchrun does')
    .argument('<script>', 'JavaScript or TypeScript file')
    .argument('[args...]', 'arguments of the script')
    .option('--nproc-per-node <n>', 'number of ranks on each machine', integer(1), 1)
    .option('--nnodes <n>', 'number of machines; run the command on each, with one RANKWISE_TOKEN', integer(1), 1)
    .option('--node-rank <n>', 'number of this machine, from 0', integer(0), 0)
    .option('--master-addr <host>', 'address of machine 0 (default: 127.0.0.1, on one machine)')
    .option('--master-port <port>', 'port for rank 0 (default: a free one, on one machine)', integer(1, 65_535))
    .option('--max-restarts <n>', 'how often all ranks of a machine are started again after one failed', integer(0), 0)
    .option(
      '--timeout <ms>',
      'longest wait of a rank for its peers (default: RANKWISE_TIMEOUT_MS, or ten minutes)',
      integer(1),
    )
    .option('--no-prefix', 'do not begin lines of output with the rank')
    .option('--inherit-rank0', 'let rank 0 write to the terminal itself, so that its progress bars work')
    .passThroughOptions()
    .action(run)
}

async function run(script: string, args: readonly string[], options: RunOptions): Promise<void> {
  const path = resolve(script)
  requireFile(path)
  process.exitCode = await launch({
    command: [process.execPath, ...nodeOptions(path), path, ...args],
    nprocPerNode: options.nprocPerNode,
    nnodes: options.nnodes,
    nodeRank: options.nodeRank,
    maxRestarts: options.maxRestarts,
    prefix: options.prefix,
    inheritRank0: options.inheritRank0 === true,
    ...(options.masterAddr === undefined ? {} : { masterAddr: options.masterAddr }),
    ...(options.masterPort === undefined ? {} : { masterPort: options.masterPort }),
    ...(options.timeout === undefined ? {} : { timeoutMs: options.timeout }),
  })
}

/** Options of Node for the ranks: the export conditions of this process, and tsx where the script needs it. */
function nodeOptions(script: string): string[] {
  const tsx = /\.[cm]?tsx?$/.test(script) ? ['--import', import.meta.resolve('tsx')] : []
  return [...exportConditions(process.execArgv), ...tsx]
}

/** The rest is not passed on: two ranks cannot, for example, share the port of `--inspect`. */
function exportConditions(execArgv: readonly string[]): string[] {
  return execArgv.flatMap((argument, i) => {
    if (argument.startsWith('--conditions=')) return [argument]
    const value = execArgv[i + 1]
    return (argument === '-C' || argument === '--conditions') && value !== undefined ? [`--conditions=${value}`] : []
  })
}

function requireFile(path: string): void {
  if (statSync(path, { throwIfNoEntry: false })?.isFile() === true) return
  throw new RankwiseError('SCRIPT_NOT_FOUND', 'there is no such script', {
    where: path,
    rule: 'the script is a JavaScript or TypeScript file',
  })
}
