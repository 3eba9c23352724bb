// `npm start`: from a fresh clone to a picture. Arguments after `--` go to `rankwise generate`; the last one wins.
import { join } from 'node:path'
import { build, buildNative, install, requireNode, root, run } from './workspace.mjs'

requireNode()
await install()
await buildNative()
await build('@rankwise/cli...')
const cli = join(root, 'packages/cli/dist/main.js')
const defaults = ['--tp', '2', '--out', 'output.png']
const { code } = await run(process.execPath, [cli, 'generate', ...defaults, ...process.argv.slice(2)])
process.exitCode = code
