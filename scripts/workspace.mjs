// What `npm start` and `npm test` share. It must load on any Node with only what Node and npm bring: the dependencies
// may not be installed yet, and an old Node should get the message below instead of a syntax error.
import { spawn } from 'node:child_process'
import { readFile } from 'node:fs/promises'
import { constants } from 'node:os'
import { delimiter, join } from 'node:path'
import { fileURLToPath } from 'node:url'

export const root = fileURLToPath(new URL('..', import.meta.url))

const manifest = JSON.parse(await readFile(join(root, 'package.json'), 'utf8'))

/** Ends the process with a message unless this Node is one that the build tools run on (`engines` of package.json). */
export function requireNode() {
  const [major, minor] = process.versions.node.split('.').map(Number)
  const supported = (major === 20 && minor >= 19) || (major === 22 && minor >= 12) || major > 22
  if (supported) return
  console.error(
    `Rankwise is built with Node.js ${manifest.engines.node}; this is ${process.version} (${process.execPath}).\n` +
      'Install a current Node.js from https://nodejs.org and run the command again.',
  )
  process.exit(1)
}

/** Installs the dependencies of exactly the committed lockfile, unless that has been done. */
export async function install() {
  if (await isInstalled()) return
  await runQuietly(
    'Installing dependencies',
    ...pnpm('install', '--frozen-lockfile', '--config.confirmModulesPurge=false'),
  )
}

/** Builds packages and what they depend on; what turbo has built before comes from its cache. */
export async function build(filter) {
  await runQuietly(
    'Building packages',
    ...pnpm('exec', 'turbo', 'run', 'build', `--filter=${filter}`, '--output-logs=errors-only'),
  )
}

/** Compiles what is native, where there is a C compiler; says in one line what came of it, unless that has been done. */
export async function buildNative() {
  const { code } = await run(process.execPath, ['scripts/build-native.mjs'])
  if (code !== 0) process.exit(code)
}

/** pnpm copies the lockfile into node_modules when an install is complete: the same text means the same dependencies. */
async function isInstalled() {
  const [wanted, installed] = await Promise.all(
    ['pnpm-lock.yaml', 'node_modules/.pnpm/lock.yaml'].map((path) =>
      readFile(join(root, path), 'utf8').catch(() => ''),
    ),
  )
  return installed !== '' && wanted.endsWith(installed)
}

/** Command line of the pnpm that `packageManager` of package.json names; npm fetches it on first use. */
export function pnpm(...args) {
  return ['npx', ['--yes', manifest.packageManager, ...args]]
}

/** Runs a command with one line saying what is happening; shows its output, and ends the process, only if it fails. */
async function runQuietly(title, command, args) {
  process.stdout.write(`${title} … `)
  const { code, output, seconds, interrupted } = await run(command, args, { capture: true })
  process.stdout.write(code === 0 ? `${seconds} s\n` : `${interrupted ? 'interrupted' : 'failed'}\n`)
  if (code === 0) return
  if (!interrupted) process.stderr.write(`${output}\n${title} failed with exit code ${code} after ${seconds} s.\n`)
  process.exit(code)
}

/**
 * Runs a command to its end in the root folder, with the tools of the workspace on the path.
 *
 * @param {string} command
 * @param {string[]} args
 * @param {{ capture?: boolean }} [options] `capture` collects stdout and stderr instead of passing them on
 * @returns {Promise<{ code: number, output: string, seconds: string, interrupted: boolean }>} `code` is 128 + n when signal n
 *   ended the command, as in a shell; `interrupted` when this process was told to end meanwhile, as by Ctrl-C
 */
export async function run(command, args, { capture = false } = {}) {
  const started = Date.now()
  const child = spawn(command, args, {
    cwd: root,
    env: {
      ...process.env,
      PATH: join(root, 'node_modules', '.bin') + delimiter + process.env.PATH,
      TURBO_TELEMETRY_DISABLED: '1',
    },
    stdio: capture ? ['ignore', 'pipe', 'pipe'] : 'inherit',
  })
  let output = ''
  for (const stream of [child.stdout, child.stderr]) stream?.setEncoding('utf8').on('data', (text) => (output += text))
  const signals = forwardSignals(child)
  const code = await new Promise((resolve) => {
    child.on('error', (error) => {
      output += error.message
      resolve(127)
    })
    child.on('close', (exitCode, signal) => resolve(exitCode ?? 128 + constants.signals[signal]))
  })
  const interrupted = signals.stop()
  return { code, output, seconds: ((Date.now() - started) / 1000).toFixed(1), interrupted }
}

/** Leaves it to the child to end on a signal, so that it can clean up and its exit code is seen. */
function forwardSignals(child) {
  const signals = ['SIGINT', 'SIGTERM', 'SIGHUP']
  let received = false
  const forward = (signal) => {
    received = true
    // Ctrl-C in a terminal has already reached the child: a second SIGINT would cut its clean-up short.
    if (signal !== 'SIGINT' || !process.stdin.isTTY) child.kill(signal)
  }
  for (const signal of signals) process.on(signal, forward)
  return {
    /** Whether there was a signal. */
    stop() {
      for (const signal of signals) process.off(signal, forward)
      return received
    },
  }
}
