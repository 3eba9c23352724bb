// `pnpm bench:NAME`: ranks run the packages as they are published, so these are built first. Further arguments go to the
// benchmark.
import { build, buildNative, install, requireNode, run } from './workspace.mjs'

const [name, ...args] = process.argv.slice(2)
requireNode()
await install()
await buildNative()
await build('@rankwise/benchmarks...')
const main = ['--import', 'tsx', '--conditions=@rankwise/source', `benchmarks/${name}/main.ts`]
const { code } = await run(process.execPath, [...main, ...args])
process.exitCode = code
