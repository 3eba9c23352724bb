// `pnpm test:mutants`: runs the conformance suites on what is broken on purpose, lists what caught each, and the score.
import { mkdtemp, readFile, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { run } from './workspace.mjs'

const folder = await mkdtemp(join(tmpdir(), 'rankwise-mutants-'))
try {
  const report = join(folder, 'report.json')
  const args = ['run', '--reporter=json', `--outputFile.json=${report}`, 'mutants.test.ts', ...process.argv.slice(2)]
  const { code, output } = await run('vitest', args, { capture: true })
  const { testResults } = JSON.parse(await readFile(report, 'utf8').catch(() => '{"testResults":[]}'))
  const tests = testResults.flatMap(({ assertionResults }) => assertionResults)
  const mutants = tests.filter(({ meta }) => meta?.caughtBy !== undefined)
  for (const { ancestorTitles, title, status, meta } of mutants) {
    const isCaught = status === 'passed'
    console.log(`${isCaught ? '✓' : '✗'} ${ancestorTitles.join(' ')}: ${title}`)
    console.log(isCaught ? `    caught by ${meta.caughtBy}` : '    not caught')
  }
  const caught = mutants.filter(({ status }) => status === 'passed').length
  console.log(`${caught} of ${mutants.length} mutants caught (${((100 * caught) / mutants.length).toFixed(1)} %)`)
  if (code !== 0 || mutants.length === 0) console.error(output)
  process.exitCode = code !== 0 || mutants.length === 0 ? 1 : 0
} finally {
  await rm(folder, { recursive: true, force: true })
}
