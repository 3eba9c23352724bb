// Packs every public package as it would be published and checks that what arrives at a user resolves and has types.
import { mkdtemp, readdir, readFile, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { publint } from 'publint'
import { formatMessage } from 'publint/utils'
import { pnpm, root, run } from './workspace.mjs'

const packages = await publicPackages()
const folder = await mkdtemp(join(tmpdir(), 'rankwise-pack-'))
try {
  const filters = packages.map(({ name }) => `--filter=${name}`)
  await runOrThrow(...pnpm('--recursive', ...filters, 'pack', '--pack-destination', folder))
  const results = packages.map((manifest) => problemsOf(manifest, join(folder, tarballName(manifest))))
  for (const [index, problems] of (await Promise.all(results)).entries()) {
    console.log(`${problems.length === 0 ? '✓' : '✗'} ${packages[index].name}`)
    for (const problem of problems) console.log(problem.replace(/^/gm, '    '))
    if (problems.length > 0) process.exitCode = 1
  }
} finally {
  await rm(folder, { recursive: true, force: true })
}

async function publicPackages() {
  const folders = await readdir(join(root, 'packages'))
  const manifests = await Promise.all(
    folders.map(async (name) => JSON.parse(await readFile(join(root, 'packages', name, 'package.json'), 'utf8'))),
  )
  return manifests.filter((manifest) => manifest.private !== true)
}

async function problemsOf(manifest, path) {
  const packed = await readFile(path)
  const tarball = packed.buffer.slice(packed.byteOffset, packed.byteOffset + packed.byteLength)
  const { messages, pkg } = await publint({ pack: { tarball }, strict: true })
  const problems = messages.map((message) => formatMessage(message, pkg, { color: false }))
  // A package that is only a command has no types to resolve.
  if (manifest.exports['.'] !== undefined) {
    const { code, output } = await run('attw', [path, '--profile', 'esm-only', '--no-color'], { capture: true })
    if (code !== 0) problems.push(output)
  }
  return problems
}

function tarballName({ name, version }) {
  return `${name.replace('@', '').replace('/', '-')}-${version}.tgz`
}

async function runOrThrow(command, args) {
  const { code, output } = await run(command, args, { capture: true })
  if (code !== 0) throw new Error(`${command} ${args.join(' ')} ended with exit code ${code}\n${output}`)
}
