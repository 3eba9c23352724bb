import { spawn, spawnSync } from 'node:child_process'
import { once } from 'node:events'
import { fileURLToPath } from 'node:url'
import { describe, expect, test } from 'vitest'

// One script under the real launchers, where they are installed.
const SCRIPT = fileURLToPath(new URL('scripts/all-reduce.ts', import.meta.url))
const PACKAGE = fileURLToPath(new URL('..', import.meta.url))
const RANK = [process.execPath, '--import', 'tsx', '--conditions=@rankwise/source', SCRIPT, 'x']
const RANKWISE_RUN = fileURLToPath(new URL('scripts/rankwise-run.ts', import.meta.url))

/** Variables that the launchers set must come from them alone. */
const env = { ...process.env, OMPI_ALLOW_RUN_AS_ROOT: '1', OMPI_ALLOW_RUN_AS_ROOT_CONFIRM: '1' }

async function run([program, ...args]: readonly string[]): Promise<{
  code: number | null
  lines: string[]
  stderr: string
}> {
  const child = spawn(program as string, args, { cwd: PACKAGE, env, stdio: ['ignore', 'pipe', 'pipe'] })
  const text = { stdout: '', stderr: '' }
  for (const name of ['stdout', 'stderr'] as const) {
    child[name].setEncoding('utf8').on('data', (chunk: string) => {
      text[name] += chunk
    })
  }
  const [code] = (await once(child, 'close')) as [number | null]
  return { code, lines: text.stdout.split('\n').filter((line) => line.endsWith(' 3 20')), stderr: text.stderr }
}

interface Launcher {
  readonly name: string
  /** Names the program, if it is not the one on PATH. */
  readonly variable: string
  readonly program: string
  /** What `--version` or the help says of the program that is meant; two MPIs have an mpirun. */
  readonly is: RegExp
  readonly args: readonly string[]
}

const LAUNCHERS: readonly Launcher[] = [
  {
    name: 'torchrun',
    variable: 'RANKWISE_TORCHRUN',
    program: 'torchrun',
    is: /--nproc[-_]per[-_]node/,
    args: ['--nproc-per-node', '2', '--no-python'],
  },
  {
    name: "OpenMPI's mpirun",
    variable: 'RANKWISE_OPENMPI_MPIRUN',
    program: 'mpirun',
    is: /Open MPI|OpenRTE|PRRTE/i,
    args: ['--oversubscribe', '-np', '2'],
  },
  {
    name: "MPICH's mpiexec",
    variable: 'RANKWISE_MPICH_MPIEXEC',
    program: 'mpiexec.hydra',
    is: /HYDRA/,
    args: ['-np', '2'],
  },
]

/** The program, if it is here; says so if not. */
function find({ name, variable, program, is }: Launcher): string | undefined {
  const path = process.env[variable] ?? program
  const outputs = ['--version', '--help'].map((option) => spawnSync(path, [option], { env, encoding: 'utf8' }))
  if (outputs.some(({ stdout, stderr }) => is.test(`${stdout}${stderr}`))) return path
  process.stderr.write(`SKIPPED: ranks under ${name}: ${path} is not installed (name it in ${variable})\n`)
  return undefined
}

describe.each(LAUNCHERS)('$name', (launcher) => {
  const program = find(launcher)

  test.runIf(program !== undefined)('starts the same script', { timeout: 60_000 }, async () => {
    const { code, lines, stderr } = await run([program as string, ...launcher.args, ...RANK])
    expect({ code, lines, stderr: code === 0 ? '' : stderr }).toEqual({
      code: 0,
      lines: ['x 3 20', 'x 3 20'],
      stderr: '',
    })
  })

  test.runIf(program !== undefined)('starts two jobs at a time', { timeout: 60_000 }, async () => {
    const jobs = await Promise.all([1, 2].map(() => run([program as string, ...launcher.args, ...RANK])))
    for (const { code, lines } of jobs) expect({ code, lines }).toEqual({ code: 0, lines: ['x 3 20', 'x 3 20'] })
  })
})

test('rankwise run starts the same script', async () => {
  const node = RANK.slice(0, -2)
  const { code, lines } = await run([...node, RANKWISE_RUN, 'run', '--no-prefix', '--nproc-per-node', '2', SCRIPT, 'x'])
  expect({ code, lines }).toEqual({ code: 0, lines: ['x 3 20', 'x 3 20'] })
})
