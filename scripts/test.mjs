// `npm test`: every check that must pass before a change is merged. Arguments after `--` go to vitest.
import { mkdtemp, readFile, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { buildNative, install, pnpm, requireNode, run } from './workspace.mjs'

const CHECKS = [
  ['format and lint', 'biome', ['check', '--error-on-warnings', '.']],
  ['types', 'tsc', ['--noEmit']],
  ['build', ...pnpm('exec', 'turbo', 'run', 'build', '--output-logs=errors-only')],
  ['published packages', process.execPath, ['scripts/check-packages.mjs']],
  ['unused code', 'knip', []],
  ['documentation', 'typedoc', ['--emit', 'none', '--validation.notDocumented', '--treatWarningsAsErrors']],
]

requireNode()
await install()
await buildNative()
const failed = []
for (const [name, command, args] of CHECKS) {
  const { code, output, seconds, interrupted } = await run(command, args, { capture: true })
  if (interrupted) process.exit(code || 130)
  if (code !== 0) failed.push(name)
  console.log(`${code === 0 ? '✓' : '✗'} ${name} (${seconds} s)`)
  if (code !== 0) console.log(output)
}
const tests = await runTests(process.argv.slice(2))
if (!tests.passing) failed.push('tests')
if (!(await isNativeTfjsBuilt())) {
  console.log(
    'Tests of the native library of TensorFlow.js were skipped: node scripts/build-tfjs-native.mjs builds it.',
  )
}
console.log(failed.length === 0 ? 'All checks and tests passed.' : `Failed: ${failed.join(', ')}.`)
console.log(`${tests.passed} passed, ${tests.failed} failed${tests.skipped > 0 ? `, ${tests.skipped} skipped` : ''}`)
process.exitCode = failed.length === 0 ? 0 : 1

async function isNativeTfjsBuilt() {
  const { code } = await run(process.execPath, ['scripts/build-tfjs-native.mjs', '--check'], { capture: true })
  return code === 0
}

/** Runs vitest and counts from its own report; a run in which nothing was executed does not pass. */
async function runTests(args) {
  const folder = await mkdtemp(join(tmpdir(), 'rankwise-test-'))
  try {
    const report = join(folder, 'report.json')
    const reporters = ['--reporter=default', '--reporter=json', `--outputFile.json=${report}`]
    const { code } = await run('vitest', ['run', ...reporters, ...args])
    const counts = count(JSON.parse(await readFile(report, 'utf8').catch(() => '{"testResults":[]}')))
    // An error outside of any test (a worker that died) fails the run without failing a test.
    if (code !== 0 && counts.failed === 0 && counts.passed > 0) counts.failed = 1
    return { ...counts, passing: code === 0 && counts.failed === 0 && counts.passed > 0 }
  } finally {
    await rm(folder, { recursive: true, force: true })
  }
}

function count({ testResults }) {
  const counts = { passed: 0, failed: 0, skipped: 0 }
  for (const file of testResults) {
    const statuses = file.assertionResults.map(({ status }) => status)
    for (const status of statuses) counts[status in counts ? status : 'skipped']++
    // A file that cannot be loaded reports no test at all: it counts as one that failed.
    if (file.status === 'failed' && !statuses.includes('failed')) counts.failed++
  }
  return counts
}
