// `pnpm test:gpu`: checks and times the package on a machine with an NVIDIA GPU, in less than 3 minutes, and prints a
// record. One GPU is enough: from NCCL 2.30 on, two ranks share it. `--bytes 4,65536` times other sizes.
import { type ChildProcess, fork, spawnSync } from 'node:child_process'
import { once } from 'node:events'
import { writeFileSync } from 'node:fs'
import { createServer } from 'node:net'
import { cpus, release } from 'node:os'
import { fileURLToPath } from 'node:url'
import { parseArgs } from 'node:util'
import { CudaRuntime } from '../../src/cuda-runtime.ts'
import { Nccl, ncclVersionText } from '../../src/nccl.ts'
import { SCENARIOS, type Scenario } from './scenarios.ts'

const LIMIT_MS = 170_000
const WORKER = fileURLToPath(new URL('rank.ts', import.meta.url))
/** What one all-reduce of FLUX.2-dev moves at 4608 tokens, the largest of these. */
const BYTES = [4, 65_536, 2 ** 20, 2 ** 24, 113_246_208]

const { values } = parseArgs({
  options: { bytes: { type: 'string', default: BYTES.join(',') }, json: { type: 'string' } },
})
const started = performance.now()
const [cuda, nccl] = await Promise.all([CudaRuntime.load({}), Nccl.load({})])
const gpus = cuda.deviceCount()
const ranks = gpus > 1 || nccl.sharesGpus ? 2 : 1
const sharesGpu = ranks > gpus
print(`${nvidiaSmi() ?? 'no nvidia-smi'}`)
print(
  `NCCL ${ncclVersionText(nccl.version)} (${nccl.from}), CUDA runtime ${cuda.runtimeVersion()}, driver ${cuda.driverVersion()}`,
)
print(`${gpus} GPU(s), ${ranks} rank(s)${sharesGpu ? ' on one GPU' : ''}`)

const children = new Set<ChildProcess>()
const watchdog = setTimeout(() => {
  print(`NOT finished after ${LIMIT_MS / 1000} s: stopped`)
  for (const child of children) child.kill('SIGKILL')
  process.exit(1)
}, LIMIT_MS)

const results: { scenario: Scenario; failures: string[]; values: unknown[] }[] = []
for (const scenario of SCENARIOS) {
  const { name, atLeast } = scenario
  if (ranks < atLeast) {
    print(`- ${name}: SKIPPED, needs ${atLeast} ranks`)
    continue
  }
  const begun = performance.now()
  const result = await run(scenario)
  results.push(result)
  const seconds = ((performance.now() - begun) / 1000).toFixed(1)
  print(`${result.failures.length === 0 ? '✓' : '✗'} ${name} (${seconds} s)`)
  for (const failure of result.failures) print(`    ${failure}`)
}
clearTimeout(watchdog)

const failed = results.filter(({ failures }) => failures.length > 0)
const record = {
  date: new Date().toISOString(),
  gpu: nvidiaSmi() ?? null,
  cpu: `${cpus().length} x ${cpus()[0]?.model}`,
  system: `Linux ${release()}, Node ${process.version}`,
  nccl: ncclVersionText(nccl.version),
  cudaRuntime: cuda.runtimeVersion(),
  cudaDriver: cuda.driverVersion(),
  ranks,
  sharesGpu,
  seconds: Math.round((performance.now() - started) / 1000),
  checks: Object.fromEntries(
    results.map(({ scenario, failures }) => [scenario.name, failures.length === 0 ? 'passed' : failures]),
  ),
  rows: results.flatMap(({ scenario, values: [first] }) =>
    scenario.name === 'time' ? ((first as unknown[]) ?? []) : [],
  ),
}
print(JSON.stringify(record, null, 2))
if (values.json !== undefined) writeFileSync(values.json, `${JSON.stringify(record, null, 2)}\n`)
process.exitCode = failed.length === 0 ? 0 : 1

async function run(scenario: Scenario): Promise<(typeof results)[number]> {
  const port = await freePort()
  const outcomes = await Promise.all(Array.from({ length: ranks }, (_, rank) => runRank(scenario, rank, port)))
  return {
    scenario,
    failures: outcomes.flatMap(({ failure }, rank) => (failure === undefined ? [] : [`rank ${rank}: ${failure}`])),
    values: outcomes.map(({ value }) => value),
  }
}

async function runRank(
  { name, dies }: Scenario,
  rank: number,
  port: number,
): Promise<{ value?: unknown; failure?: string }> {
  const child = fork(WORKER, [name, values.bytes], {
    env: {
      ...process.env,
      RANK: String(rank),
      WORLD_SIZE: String(ranks),
      LOCAL_RANK: String(sharesGpu ? 0 : rank),
      LOCAL_WORLD_SIZE: String(ranks),
      MASTER_ADDR: '127.0.0.1',
      MASTER_PORT: String(port),
      RANKWISE_TIMEOUT_MS: '30000',
      ...(sharesGpu ? { NCCL_MULTI_RANK_GPU_ENABLE: '1' } : {}),
    },
    execArgv: ['--import', 'tsx', '--conditions=@rankwise/source'],
  })
  children.add(child)
  let message: { value?: unknown; failure?: string } | undefined
  child.on('message', (reported: typeof message) => {
    message = reported
  })
  const [code, signal] = await once(child, 'exit')
  children.delete(child)
  if (rank === dies) return signal === 'SIGKILL' ? {} : { failure: `ended with ${code ?? signal} instead of SIGKILL` }
  if (message === undefined || code !== 0) return { failure: message?.failure ?? `ended with ${code ?? signal}` }
  return message
}

function nvidiaSmi(): string | undefined {
  const query = ['--query-gpu=name,memory.total,driver_version,pcie.link.gen.current', '--format=csv,noheader']
  const { status, stdout } = spawnSync('nvidia-smi', query, { encoding: 'utf8' })
  return status === 0 ? stdout.trim() : undefined
}

async function freePort(): Promise<number> {
  const server = createServer().listen(0, '127.0.0.1')
  await once(server, 'listening')
  const { port } = server.address() as { port: number }
  server.close()
  await once(server, 'close')
  return port
}

function print(text: string): void {
  process.stdout.write(`${text}\n`)
}
