// Compiles the addon of this package into prebuilds/, where node-gyp-build looks. Needs a C compiler ($CC, or cc) and
// nothing else: Node-API is the same in every Node.js, and its headers come from npm, or with Node.js itself. Says in
// one line what it did, if anything; ends with an error only when there is a compiler and it refuses our sources.
import { execFileSync } from 'node:child_process'
import { existsSync, mkdirSync, mkdtempSync, readdirSync, renameSync, rmSync, statSync, writeFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { tmpdir } from 'node:os'
import { dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'

const CC = process.env.CC || 'cc'
const root = fileURLToPath(new URL('..', import.meta.url))
const sources = join(root, 'native')
const libc = process.report.getReport().header.glibcVersionRuntime === undefined ? 'musl' : 'glibc'
const target = join(root, 'prebuilds', `${process.platform}-${process.arch}`, `node.napi.${libc}.node`)

// No option may let the compiler reorder or fuse floating-point operations. Traps are off by default in a process: with
// -fno-trapping-math, comparisons may be vectorised; it changes no result.
const FLAGS = ['-O3', '-std=c11', '-Wall', '-Wextra', '-fPIC', '-fvisibility=hidden']
const ARITHMETIC = ['-ffp-contract=off', '-fno-trapping-math']
// reduce.c, once per instruction set; see native/variants.c.
const X64_VARIANTS = [
  ['reduce_avx2', ['-mavx2', '-mf16c']],
  ['reduce_avx512', ['-mavx512f', '-mavx512bw', '-mavx512vl', '-mavx512dq', '-mf16c', '-mprefer-vector-width=512']],
]
const variants = [['reduce_baseline', []], ...(process.arch === 'x64' ? X64_VARIANTS : [])]

const started = Date.now()
if (process.platform !== 'linux') say(`ranks share memory on Linux only; nothing to compile on ${process.platform}`)
else if (!isCurrent()) {
  const folder = mkdtempSync(join(tmpdir(), 'rankwise-native-'))
  try {
    if (canCompile(folder)) {
      compile(folder)
      say(`compiled in ${((Date.now() - started) / 1000).toFixed(1)} s`)
    } else say(`no working C compiler (${CC}); ranks reduce with WebAssembly instead, which is slower`)
  } finally {
    rmSync(folder, { recursive: true, force: true })
  }
}

function say(what) {
  console.log(`Native kernel of @rankwise/collectives-local: ${what}`)
}

function isCurrent() {
  const built = statSync(target, { throwIfNoEntry: false })?.mtimeMs ?? 0
  return readdirSync(sources).every((name) => statSync(join(sources, name)).mtimeMs < built)
}

/** Whether there is a compiler with the headers of a C library and of the kernel. */
function canCompile(folder) {
  const probe = join(folder, 'probe.c')
  writeFileSync(probe, '#include <stdlib.h>\n#include <linux/futex.h>\nint probe(void) { return abs(-1); }\n')
  try {
    execFileSync(CC, ['-shared', '-fPIC', probe, '-o', join(folder, 'probe.so')], { stdio: 'ignore' })
    return true
  } catch {
    return false
  }
}

function compile(folder) {
  const include = headers()
  const objects = ['addon', 'group', 'meeting', 'variants'].map((name) => object(folder, name, name, [`-I${include}`]))
  const kernels = variants.map(([name, options]) => object(folder, 'reduce', name, [`-DVARIANT=${name}`, ...options]))
  mkdirSync(dirname(target), { recursive: true })
  // Another process may load the addon just now: it gets the old or the new one, never half of it.
  const temporary = `${target}.${process.pid}`
  execFileSync(CC, ['-shared', '-s', ...objects, ...kernels, '-o', temporary], { stdio: 'inherit' })
  renameSync(temporary, target)
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

function object(folder, source, name, options) {
  const path = join(folder, `${name}.o`)
  const input = join(sources, `${source}.c`)
  execFileSync(CC, [...FLAGS, ...ARITHMETIC, ...options, '-c', input, '-o', path], { stdio: 'inherit' })
  return path
}
