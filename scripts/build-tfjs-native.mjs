// Builds the addon of TensorFlow.js, unmodified, against the library of the pip package `tensorflow-cpu`, for the native
// engine of backend-tfjs. It goes into the user's cache, where backend-tfjs looks for it; what is there already stays.
// Needs g++, tar, and a Python with pip, which is only used to download and unpack. `--where` prints the
// folder, `--check` only fails where nothing that works is there.
import { spawn } from 'node:child_process'
import { cp, mkdir, mkdtemp, readdir, rename, rm } from 'node:fs/promises'
import { homedir } from 'node:os'
import { join } from 'node:path'

const TFJS_NODE = '@tensorflow/tfjs-node-gpu@4.22.0'
const NODE_API_HEADERS = 'node-api-headers@1.9.0'
const TENSORFLOW = 'tensorflow-cpu==2.21.0'
/** The library is the same for every Python; this one has a wheel, whichever runs pip. */
const WHEEL_PYTHON = '3.12'
const LIBRARIES = ['libtensorflow_cc.so.2', 'libtensorflow_framework.so.2']
const SOURCES = ['tfjs_backend.cc', 'tfjs_binding.cc']
/** The highest that tfjs-node 4.22.0 is published for. */
const NAPI_VERSION = 8

const cache = join(process.env.XDG_CACHE_HOME || join(homedir(), '.cache'), 'rankwise')
// `buildFolder` of packages/backend-tfjs/src/native/addon.ts; a test compares them.
const folder = join(cache, `tfjs-node-4.22.0-tensorflow-2.21.0-${process.platform}-${process.arch}`)

if (process.argv.includes('--where')) {
  console.log(folder)
} else if (process.argv.includes('--check')) {
  process.exitCode = (await works(folder)) ? 0 : 1
} else {
  try {
    await main()
  } catch (error) {
    console.error(`The native library of TensorFlow.js was not built. ${error.message}`)
    process.exitCode = 1
  }
}

async function main() {
  if (await works(folder)) {
    console.log(`The native library of TensorFlow.js is there: ${folder}`)
    return
  }
  if (process.platform !== 'linux') throw new Error(`It is built on Linux; this is ${process.platform}.`)
  await mkdir(cache, { recursive: true })
  const work = await mkdtemp(join(cache, 'build-tfjs-native-'))
  try {
    const built = await build(work)
    if (!(await works(built))) throw new Error('What was built does not multiply 2 by 3.')
    await replace(built)
  } finally {
    await rm(work, { recursive: true, force: true })
  }
  console.log(`The native library of TensorFlow.js is there: ${folder}`)
}

/** @returns the folder with the addon and its libraries */
async function build(work) {
  await step('Downloading the sources', async () => {
    await run('npm', ['pack', '--silent', '--pack-destination', work, TFJS_NODE, NODE_API_HEADERS], work)
    for (const name of ['tensorflow-tfjs-node-gpu', 'node-api-headers']) await unpackNpm(work, name)
  })
  await step('Downloading TensorFlow (270 MB)', async () => {
    const only = ['--no-deps', '--only-binary=:all:', `--python-version=${WHEEL_PYTHON}`]
    await run('python3', ['-m', 'pip', 'download', '--quiet', ...only, '--dest', work, TENSORFLOW], work)
    const wheel = (await readdir(work)).find((name) => name.endsWith('.whl'))
    await run('python3', ['-m', 'zipfile', '-e', wheel, 'wheel'], work)
  })
  const out = join(work, 'out')
  await mkdir(join(out, 'lib'), { recursive: true })
  await step('Compiling', () => compile(work, out))
  return out
}

async function unpackNpm(work, name) {
  const tarball = (await readdir(work)).find((file) => file.startsWith(`${name}-`) && file.endsWith('.tgz'))
  await mkdir(join(work, name))
  await run('tar', ['-xzf', tarball, '-C', name, '--strip-components=1'], work)
}

async function compile(work, out) {
  const [sources, tensorflow] = [join(work, 'tensorflow-tfjs-node-gpu'), join(work, 'wheel', 'tensorflow')]
  for (const library of LIBRARIES) await cp(join(tensorflow, library), join(out, 'lib', library))
  const includes = [join(work, 'node-api-headers/include'), join(tensorflow, 'include')].map((path) => `-I${path}`)
  const flags = ['-std=c++17', '-O2', '-fPIC', `-DNAPI_VERSION=${NAPI_VERSION}`, ...includes]
  const objects = SOURCES.map((name) => join(work, `${name}.o`))
  for (const [i, name] of SOURCES.entries()) {
    await run('g++', [...flags, '-c', join(sources, 'binding', name), '-o', objects[i]], work)
  }
  const libraries = LIBRARIES.map((name) => `-l:${name}`)
  const link = [`-L${join(out, 'lib')}`, ...libraries, '-Wl,-rpath,$ORIGIN/lib', '-o', join(out, 'tfjs_binding.node')]
  await run('g++', ['-shared', ...objects, ...link], work)
}

/** Whether the addon of a folder loads and computes, in a process of its own: a broken one could crash it. */
async function works(path) {
  const script = `
    const tf = require(${JSON.stringify(join(path, 'tfjs_binding.node'))})
    const scalar = (value) => tf.createTensor([], tf.TF_FLOAT, Float32Array.of(value))
    const type = { name: 'T', type: tf.TF_ATTR_TYPE, value: tf.TF_FLOAT }
    const [{ id }] = tf.executeOp('Mul', [type], [scalar(2), scalar(3)], 1)
    process.exitCode = tf.tensorDataSync(id)[0] === 6 ? 0 : 1
  `
  return run(process.execPath, ['-e', script]).then(
    () => true,
    () => false,
  )
}

/** Another build may have been faster; one that does not work is replaced. */
async function replace(built) {
  if (await works(folder)) return
  await rm(folder, { recursive: true, force: true })
  await rename(built, folder)
}

async function step(title, body) {
  const started = Date.now()
  process.stdout.write(`${title} … `)
  await body()
  process.stdout.write(`${((Date.now() - started) / 1000).toFixed(1)} s\n`)
}

/** Runs a command to its end. @throws Error with its output */
async function run(command, args, cwd) {
  const child = spawn(command, args, { cwd, stdio: ['ignore', 'pipe', 'pipe'] })
  let output = ''
  for (const stream of [child.stdout, child.stderr]) stream.setEncoding('utf8').on('data', (text) => (output += text))
  const code = await new Promise((resolve) => {
    child.on('error', ({ message }) => {
      output += message
      resolve(127)
    })
    child.on('close', (exitCode, signal) => resolve(exitCode ?? signal))
  })
  if (code !== 0) throw new Error(`${command} ended with ${code}:\n${output}`)
}
