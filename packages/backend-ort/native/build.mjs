// Compiles the addon of this package into prebuilds/, where node-gyp-build looks. Needs a C compiler ($CC, or cc) and
// nothing else: Node-API is the same in every Node.js, and its headers come from npm, or with Node.js itself. Says in
// one line what it did, if anything; ends with an error only when there is a compiler and it refuses our sources.
import { execFileSync } from 'node:child_process'
import {
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  statSync,
  writeFileSync,
} from 'node:fs'
import { createRequire } from 'node:module'
import { tmpdir } from 'node:os'
import { dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'

const CC = process.env.CC || 'cc'
const root = fileURLToPath(new URL('..', import.meta.url))
const sources = join(root, 'native')
const libc = process.report.getReport().header.glibcVersionRuntime === undefined ? 'musl' : 'glibc'
const target = join(root, 'prebuilds', `${process.platform}-${process.arch}`, `node.napi.${libc}.node`)

const FLAGS = ['-O2', '-std=c11', '-Wall', '-Wextra', '-fPIC', '-fvisibility=hidden']
const SOURCES = ['addon', 'cuda', 'cuda-addon', 'gemm', 'linear', 'runtime', 'session', 'worker']
// gemm-kernel.c, once per instruction set.
const kernels = JSON.parse(readFileSync(join(sources, 'gemm-variants.json'), 'utf8'))

const started = Date.now()
if (process.platform !== 'linux') say(`it is made for Linux only; nothing to compile on ${process.platform}`)
else if (!isCurrent()) {
  const folder = mkdtempSync(join(tmpdir(), 'rankwise-native-'))
  try {
    if (canCompile(folder)) {
      compile(folder)
      say(`compiled in ${((Date.now() - started) / 1000).toFixed(1)} s`)
    } else say(`no working C compiler (${CC}); ONNX Runtime is called through its Node.js binding, which is slower`)
  } finally {
    rmSync(folder, { recursive: true, force: true })
  }
}

function say(what) {
  console.log(`Native engine of @rankwise/backend-ort: ${what}`)
}

function isCurrent() {
  const built = statSync(target, { throwIfNoEntry: false })?.mtimeMs ?? 0
  return readdirSync(sources).every((name) => statSync(join(sources, name)).mtimeMs < built)
}

/** Whether there is a compiler with the headers of a C library. */
function canCompile(folder) {
  const probe = join(folder, 'probe.c')
  writeFileSync(probe, '#include <stdlib.h>\nint probe(void) { return abs(-1); }\n')
  try {
    execFileSync(CC, ['-shared', '-fPIC', probe, '-o', join(folder, 'probe.so')], { stdio: 'ignore' })
    return true
  } catch {
    return false
  }
}

function compile(folder) {
  const files = SOURCES.map((name) => join(sources, `${name}.c`))
  const variants = Object.entries(kernels.variants[process.arch] ?? { gemm_baseline: [] })
  const objects = variants.map(([name, options]) => kernelObject(folder, name, options))
  mkdirSync(dirname(target), { recursive: true })
  // Another process may load the addon just now: it gets the old or the new one, never half of it.
  const temporary = `${target}.${process.pid}`
  const options = [
    ...FLAGS,
    `-I${headers()}`,
    '-shared',
    '-s',
    ...files,
    ...objects,
    '-pthread',
    '-ldl',
    '-o',
    temporary,
  ]
  execFileSync(CC, options, { stdio: 'inherit' })
  renameSync(temporary, target)
}

function kernelObject(folder, name, options) {
  const path = join(folder, `${name}.o`)
  const source = join(sources, 'gemm-kernel.c')
  const flags = [...kernels.options, ...options, '-fvisibility=hidden', `-DVARIANT=${name}`]
  execFileSync(CC, [...flags, '-c', source, '-o', path], { stdio: 'inherit' })
  return path
}

/** Development gets them from npm; a package that was installed may find those of its Node.js. */
function headers() {
  try {
    return createRequire(import.meta.url)('node-api-headers').include_dir
  } catch {
    const own = join(dirname(process.execPath), '..', 'include', 'node')
    if (existsSync(join(own, 'node_api.h'))) return own
    throw new Error(`no Node-API headers in ${own}; install the npm package node-api-headers`)
  }
}
