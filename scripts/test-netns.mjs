// `pnpm test:netns`: two network namespaces with a cable between them, two ranks in each, over MPI. Needs root, `ip` and
// MPICH (Debian: apt-get install iproute2 libmpich12), and prints what it showed.
import { spawn } from 'node:child_process'
import { randomBytes } from 'node:crypto'
import { mkdtemp, readFile, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { build, install, requireNode, root, run } from './workspace.mjs'

/** Addresses of TEST-NET-2, which no network uses. */
const SIDES = [
  { name: `rankwise-a-${process.pid}`, device: 'cable-a', address: '198.51.100.1' },
  { name: `rankwise-b-${process.pid}`, device: 'cable-b', address: '198.51.100.2' },
]
const PER_SIDE = 2
const PORT = 29_500
/** What survivors have to notice. */
const NOTICE_MS = 2_000
const CLI = join(root, 'packages/cli/dist/main.js')
const EXAMPLE = join(root, 'examples/several-machines-flux2.ts')
const RANK = join(root, 'packages/collectives-mpi/test/workers/network-rank.ts')

requireNode()
await install()
await build('@rankwise/cli...')
await build('@rankwise/examples...')
/** What has been started and not yet ended. */
const running = new Set()
const folder = await mkdtemp(join(tmpdir(), 'rankwise-netns-'))
try {
  await connectSides()
  await samePicture()
  await closedNetwork()
  console.log('All of it works across two network namespaces.')
} finally {
  for (const child of running) child.kill('SIGKILL')
  for (const { name } of SIDES) await ip('netns', 'delete', name).catch(() => {})
  await rm(folder, { recursive: true, force: true })
}

/** Two namespaces in which nothing but the other one can be reached. */
async function connectSides() {
  const [a, b] = SIDES
  for (const { name } of SIDES) await ip('netns', 'add', name)
  await ip('link', 'add', a.device, 'netns', a.name, 'type', 'veth', 'peer', 'name', b.device, 'netns', b.name)
  for (const { name, device, address } of SIDES) {
    await ip('-n', name, 'address', 'add', `${address}/24`, 'dev', device)
    await ip('-n', name, 'link', 'set', 'lo', 'up')
    await ip('-n', name, 'link', 'set', device, 'up')
  }
}

/** The demo pipeline draws with two ranks on each side what one rank draws alone. */
async function samePicture() {
  const [alone, apart] = [join(folder, 'alone.png'), join(folder, 'apart.png')]
  await succeed('one rank', start([process.execPath, CLI, 'run', EXAMPLE, alone]))
  const token = randomBytes(32).toString('hex')
  const sides = SIDES.map((side, nodeRank) => {
    const machines = ['--nnodes', SIDES.length, '--node-rank', nodeRank]
    const master = ['--master-addr', SIDES[0].address, '--master-port', PORT]
    const ranks = ['--nproc-per-node', PER_SIDE, ...machines, ...master]
    return start([process.execPath, CLI, 'run', ...ranks, EXAMPLE, apart], side, { RANKWISE_TOKEN: token })
  })
  const outputs = await Promise.all(sides.map((side, i) => succeed(`side ${i}`, side)))
  for (const output of outputs) process.stdout.write(output)
  if (!outputs.every((output) => output.includes("of 4, on 'mpi' collectives"))) throw new Error('MPI was not used')
  const difference = await greatestDifference(alone, apart)
  console.log(`picture of 2 + 2 ranks over MPI: pixels differ from those of one rank by at most ${difference} of 255`)
  if (difference > 1) throw new Error('the pictures differ')
}

/** The cable is cut: the ranks of each side name those of the other one. */
async function closedNetwork() {
  const ranks = SIDES.flatMap((side, machine) =>
    Array.from({ length: PER_SIDE }, (_, localRank) => {
      const node = ['--import', 'tsx', '--conditions=@rankwise/source']
      return start([process.execPath, ...node, RANK], side, {
        RANK: machine * PER_SIDE + localRank,
        WORLD_SIZE: SIDES.length * PER_SIDE,
        LOCAL_RANK: localRank,
        LOCAL_WORLD_SIZE: PER_SIDE,
        MASTER_ADDR: SIDES[0].address,
        MASTER_PORT: PORT,
      })
    }),
  )
  await ranks[0].printed('running')
  const cut = Date.now()
  await ip('-n', SIDES[0].name, 'link', 'set', SIDES[0].device, 'down')
  for (const [rank, started] of ranks.entries()) {
    const output = await succeed(`rank ${rank}`, started)
    const { code, ranks: named, at } = JSON.parse(output.split('\n').find((line) => line.startsWith('{')))
    console.log(`rank ${rank}: ${code} of ranks ${named.join(', ')}, ${at - cut} ms after the network was closed`)
    const others = rank < PER_SIDE ? [2, 3] : [0, 1]
    if (code !== 'RANK_LOST' || String(named) !== String(others)) throw new Error(`rank ${rank} should name ${others}`)
    if (at - cut > NOTICE_MS) throw new Error(`rank ${rank} took longer than ${NOTICE_MS} ms`)
  }
}

/** @param {{ name: string }} [side] the namespace to run in */
function start(command, side, env = {}) {
  const inside = side === undefined ? [] : ['ip', 'netns', 'exec', side.name]
  const [program, ...args] = [...inside, ...command].map(String)
  const variables = Object.entries(env).map(([name, value]) => [name, String(value)])
  const child = spawn(program, args, { cwd: root, env: { ...process.env, ...Object.fromEntries(variables) } })
  running.add(child)
  child.on('exit', () => running.delete(child))
  let output = ''
  for (const stream of [child.stdout, child.stderr]) stream.setEncoding('utf8').on('data', (text) => (output += text))
  const exited = new Promise((resolve, reject) => {
    child.on('error', reject)
    child.on('close', (code, signal) => resolve({ how: signal ?? code, output }))
  })
  const printed = (text) =>
    new Promise((resolve, reject) => {
      const look = () => output.includes(text) && resolve()
      child.stdout.on('data', look)
      void exited.then(() => reject(new Error(`ended without printing '${text}':\n${output}`)))
      look()
    })
  return { exited, printed }
}

async function succeed(what, { exited }) {
  const { how, output } = await exited
  if (how !== 0) throw new Error(`${what} ended with ${how}:\n${output}`)
  return output
}

async function ip(...args) {
  const { code, output } = await run('ip', args, { capture: true })
  if (code !== 0) throw new Error(`ip ${args.join(' ')}: ${output} (this script needs root and iproute2)`)
}

async function greatestDifference(...paths) {
  const { Image } = await import(join(root, 'packages/diffusion/dist/index.js'))
  const files = await Promise.all(paths.map((path) => readFile(path)))
  const [a, b] = files.map((bytes) => Image.fromPng(bytes).data)
  if (a.length !== b.length) throw new Error('the pictures have different sizes')
  return a.reduce((most, value, i) => Math.max(most, Math.abs(value - b[i])), 0)
}
