import { describe, expect, test } from 'vitest'
import {
  DEFAULT_TIMEOUT_MS,
  type Environment,
  type EnvironmentRendezvous,
  rendezvousFromEnv,
} from '../src/rendezvous.ts'

const TORCHRUN = {
  RANK: '3',
  LOCAL_RANK: '1',
  WORLD_SIZE: '4',
  LOCAL_WORLD_SIZE: '2',
  MASTER_ADDR: 'node-0.cluster',
  MASTER_PORT: '29500',
}

describe('rendezvousFromEnv', () => {
  test('nothing set: rank 0 of 1', () => {
    expect(rendezvousFromEnv({ PATH: '/bin' })).toMatchObject({
      rank: 0,
      localRank: 0,
      worldSize: 1,
      localWorldSize: 1,
      timeoutMs: DEFAULT_TIMEOUT_MS,
    })
  })

  test("torchrun's variables", () => {
    expect(rendezvousFromEnv({ ...TORCHRUN, RANKWISE_TIMEOUT_MS: '5000', RANKWISE_TOKEN: 'secret' })).toEqual({
      rank: 3,
      localRank: 1,
      worldSize: 4,
      localWorldSize: 2,
      masterAddr: 'node-0.cluster',
      masterPort: 29500,
      timeoutMs: 5000,
      token: 'secret',
    })
  })

  test('without the local variables all ranks are on this machine', () => {
    const { LOCAL_RANK, LOCAL_WORLD_SIZE, ...env } = TORCHRUN
    expect(rendezvousFromEnv(env)).toMatchObject({ localRank: 3, localWorldSize: 4 })
  })

  test('a timeout alone still means one rank', () => {
    expect(rendezvousFromEnv({ RANKWISE_TIMEOUT_MS: '5000' })).toMatchObject({ worldSize: 1, timeoutMs: 5000 })
  })

  test.each(Object.keys(TORCHRUN))('%s missing', (name) => expectRefused({ ...TORCHRUN, [name]: undefined }, name))

  test.each(Object.keys(TORCHRUN))('%s alone', (name) => {
    const value = TORCHRUN[name as keyof typeof TORCHRUN]
    expect(() => rendezvousFromEnv({ [name]: value })).toThrow(
      expect.objectContaining({ code: 'RENDEZVOUS_ENV', rule: expect.stringContaining(`when ${name} is set`) }),
    )
  })

  test.each([
    ['RANK', ''],
    ['RANK', '-1'],
    ['RANK', '1.0'],
    ['RANK', ' 1'],
    ['RANK', '1e0'],
    ['RANK', '0x1'],
    ['RANK', '4'],
    ['WORLD_SIZE', '0'],
    ['WORLD_SIZE', 'two'],
    ['WORLD_SIZE', '9007199254740993'],
    ['LOCAL_RANK', '2'],
    ['LOCAL_WORLD_SIZE', '0'],
    ['LOCAL_WORLD_SIZE', '5'],
    ['MASTER_ADDR', ''],
    ['MASTER_ADDR', 'two words'],
    ['MASTER_PORT', '0'],
    ['MASTER_PORT', '65536'],
    ['MASTER_PORT', 'http'],
    ['RANKWISE_TIMEOUT_MS', '0'],
    ['RANKWISE_TIMEOUT_MS', '5s'],
    ['RANKWISE_TIMEOUT_MS', '2147483648'],
  ])('%s=%o is refused', (name, value) => expectRefused({ ...TORCHRUN, [name]: value }, name, value))

  test('a local rank above the rank is refused', () => {
    expectRefused({ ...TORCHRUN, RANK: '0' }, 'LOCAL_RANK', '1')
  })
})

function expectRefused(env: Environment, name: string, value?: string): void {
  expect(() => rendezvousFromEnv(env)).toThrow(
    expect.objectContaining({
      code: 'RENDEZVOUS_ENV',
      where: `environment variable ${name}`,
      actual: { [name]: value === undefined ? 'unset' : JSON.stringify(value) },
      rule: expect.stringContaining(name),
    }),
  )
}

describe("OpenMPI's mpirun", () => {
  const OMPI = {
    OMPI_COMM_WORLD_RANK: '3',
    OMPI_COMM_WORLD_SIZE: '4',
    OMPI_COMM_WORLD_LOCAL_RANK: '3',
    OMPI_COMM_WORLD_LOCAL_SIZE: '4',
    OMPI_MCA_orte_precondition_transports: '31f08690a487a1c5-257402952befd999',
    PMIX_NAMESPACE: '1772552193',
  }

  test('on one machine: loopback, ports and a token of the job', () => {
    const rendezvous = rendezvousFromEnv(OMPI)
    expect(rendezvous).toMatchObject({
      rank: 3,
      worldSize: 4,
      localRank: 3,
      localWorldSize: 4,
      masterAddr: '127.0.0.1',
    })
    expect(rendezvous.token).toMatch(/^[0-9a-f]{64}$/)
    expectDerivedPorts(rendezvous)
    expect(JSON.stringify(rendezvous)).not.toMatch('31f08690a487a1c5')
    const same = rendezvousFromEnv({ ...OMPI, OMPI_COMM_WORLD_RANK: '0', OMPI_COMM_WORLD_LOCAL_RANK: '0' })
    expect({ ...same, rank: 3, localRank: 3 }).toEqual(rendezvous)
  })

  test('another job has other ports, another id and another token', () => {
    const other = rendezvousFromEnv({ ...OMPI, OMPI_MCA_orte_precondition_transports: 'another' })
    const { masterPort, jobId, token } = rendezvousFromEnv(OMPI)
    expect([other.masterPort, other.jobId, other.token]).not.toContain(masterPort)
    expect(other.jobId).not.toBe(jobId)
    expect(other.token).not.toBe(token)
  })

  test('without a key, the namespace tells jobs apart, and there is no token', () => {
    const rendezvous = rendezvousFromEnv({ ...OMPI, OMPI_MCA_orte_precondition_transports: undefined })
    expectDerivedPorts(rendezvous)
    expect(rendezvous.token).toBeUndefined()
  })

  test('what the user sets wins', () => {
    const env = { ...OMPI, MASTER_ADDR: 'node-0', MASTER_PORT: '29500', RANKWISE_TOKEN: 'own' }
    const rendezvous = rendezvousFromEnv(env)
    expect(rendezvous).toMatchObject({ masterAddr: 'node-0', masterPort: 29500, token: 'own' })
    expect(rendezvous.portCount).toBeUndefined()
    expect(rendezvousFromEnv({ ...OMPI, MASTER_ADDR: 'node-0' })).toMatchObject({ masterAddr: 'node-0', portCount: 8 })
  })

  test('on several machines the address has to be given', () => {
    expectRefused({ ...OMPI, OMPI_COMM_WORLD_LOCAL_RANK: '1', OMPI_COMM_WORLD_LOCAL_SIZE: '2' }, 'MASTER_ADDR')
  })

  test.each(['OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_LOCAL_SIZE', 'OMPI_COMM_WORLD_LOCAL_RANK'])(
    '%s missing',
    (name) => expectRefused({ ...OMPI, [name]: undefined }, name),
  )

  test('inside of srun, mpirun is nearer', () => {
    const env = { ...OMPI, SLURM_PROCID: '0', SLURM_STEP_ID: '0', SLURM_NTASKS: '1', SLURM_LOCALID: '0' }
    expect(rendezvousFromEnv(env)).toMatchObject({ rank: 3, worldSize: 4 })
  })

  test('around torchrun, torchrun is nearer', () => {
    const env = { ...TORCHRUN, ...OMPI, TORCHELASTIC_RUN_ID: 'run', RANK: '1', WORLD_SIZE: '2', LOCAL_WORLD_SIZE: '2' }
    expect(rendezvousFromEnv(env)).toMatchObject({ rank: 1, worldSize: 2, token: undefined })
  })

  test('a script may copy them to the names of torchrun, but not change them', () => {
    const copied = { ...TORCHRUN, ...OMPI, LOCAL_RANK: '3', LOCAL_WORLD_SIZE: '4' }
    expect(rendezvousFromEnv(copied)).toMatchObject({ rank: 3, worldSize: 4 })
    for (const change of [{ RANK: '2', LOCAL_RANK: '2' }, { WORLD_SIZE: '5' }]) {
      expect(() => rendezvousFromEnv({ ...copied, ...change })).toThrow(
        expect.objectContaining({
          code: 'RENDEZVOUS_ENV',
          where: 'environment variables RANK and OMPI_COMM_WORLD_RANK',
        }),
      )
    }
  })

  test('and PMI that differ are refused', () => {
    const env = { ...OMPI, PMI_RANK: '1', PMI_SIZE: '4', MPI_LOCALRANKID: '1', MPI_LOCALNRANKS: '4' }
    expect(() => rendezvousFromEnv(env)).toThrow(expect.objectContaining({ code: 'RENDEZVOUS_ENV' }))
    expect(rendezvousFromEnv({ ...env, PMI_RANK: '3', MPI_LOCALRANKID: '3' })).toMatchObject({ rank: 3 })
  })
})

describe("MPICH's mpiexec", () => {
  const PMI = { PMI_RANK: '1', PMI_SIZE: '2', MPI_LOCALRANKID: '1', MPI_LOCALNRANKS: '2' }

  test('with an address', () => {
    expect(rendezvousFromEnv({ ...PMI, MASTER_ADDR: '127.0.0.1', MASTER_PORT: '29500' })).toMatchObject({
      rank: 1,
      worldSize: 2,
      localRank: 1,
      localWorldSize: 2,
      masterPort: 29500,
    })
  })

  test('without anything that tells jobs apart, the address has to be given', () => {
    expectRefused(PMI, 'MASTER_ADDR')
    expectRefused({ ...PMI, MASTER_ADDR: 'node-0' }, 'MASTER_PORT')
    expectRefused({ ...PMI, HYDI_CONTROL_FD: '99999' }, 'MASTER_ADDR')
    expectRefused({ ...PMI, HYDI_CONTROL_FD: '../1' }, 'MASTER_ADDR')
  })
})

describe('srun', () => {
  const SLURM = {
    SLURM_JOB_ID: '4711',
    SLURM_STEP_ID: '0',
    SLURM_PROCID: '4',
    SLURM_STEP_NUM_TASKS: '5',
    SLURM_NODEID: '2',
    SLURM_LOCALID: '0',
    SLURM_STEP_TASKS_PER_NODE: '2(x2),1',
    SLURM_STEP_NODELIST: 'gpu[07-08,10]',
  }

  test('ranks of several machines meet at the first', () => {
    const rendezvous = rendezvousFromEnv(SLURM)
    expect(rendezvous).toMatchObject({ rank: 4, worldSize: 5, localRank: 0, localWorldSize: 1, masterAddr: 'gpu07' })
    expectDerivedPorts(rendezvous)
    expect(rendezvous.token).toBeUndefined()
    const neighbour = { ...SLURM, SLURM_PROCID: '1', SLURM_NODEID: '0', SLURM_LOCALID: '1' }
    expect(rendezvousFromEnv(neighbour)).toMatchObject({
      localRank: 1,
      localWorldSize: 2,
      masterPort: rendezvous.masterPort,
    })
  })

  test('ranks of one machine meet at home', () => {
    const env = { ...SLURM, SLURM_STEP_TASKS_PER_NODE: '5', SLURM_NODEID: '0', SLURM_LOCALID: '4' }
    expect(rendezvousFromEnv(env)).toMatchObject({ masterAddr: '127.0.0.1', localWorldSize: 5 })
  })

  test('each step has its own ports', () => {
    expect(rendezvousFromEnv({ ...SLURM, SLURM_STEP_ID: '1' }).jobId).not.toBe(rendezvousFromEnv(SLURM).jobId)
  })

  test('PMI variables that srun sets, too, do not count', () => {
    expect(rendezvousFromEnv({ ...SLURM, PMI_RANK: '4', PMI_SIZE: '5' })).toMatchObject({ localWorldSize: 1 })
  })

  test('a batch script is no rank', () => {
    expect(rendezvousFromEnv({ ...SLURM, SLURM_STEP_ID: undefined })).toMatchObject({ rank: 0, worldSize: 1 })
  })

  test.each([
    ['SLURM_STEP_TASKS_PER_NODE', '2(x2)'],
    ['SLURM_STEP_TASKS_PER_NODE', '2(x999999999)'],
    ['SLURM_STEP_TASKS_PER_NODE', 'two'],
    ['SLURM_STEP_NODELIST', 'gpu[7-'],
    ['SLURM_STEP_NODELIST', ''],
    ['SLURM_NODEID', '3'],
    ['SLURM_LOCALID', '1'],
    ['SLURM_PROCID', '5'],
  ])('%s=%o is refused', (name, value) => expectRefused({ ...SLURM, [name]: value }, name, value))
})

test("torchrun's agent holds the store", () => {
  const env = { ...TORCHRUN, TORCHELASTIC_RUN_ID: 'run', TORCHELASTIC_RESTART_COUNT: '2' }
  expect(rendezvousFromEnv({ ...env, TORCHELASTIC_USE_AGENT_STORE: 'True' })).toMatchObject({
    agentRunId: 'run',
    restartCount: 2,
  })
  for (const value of [undefined, 'False']) {
    expect(rendezvousFromEnv({ ...env, TORCHELASTIC_USE_AGENT_STORE: value }).agentRunId).toBeUndefined()
  }
  expectRefused({ ...env, TORCHELASTIC_RESTART_COUNT: 'x' }, 'TORCHELASTIC_RESTART_COUNT', 'x')
})

test('an empty token is refused: it would let everybody in', () => {
  expect(() => rendezvousFromEnv({ ...TORCHRUN, RANKWISE_TOKEN: '' })).toThrow(
    expect.objectContaining({ code: 'RENDEZVOUS_ENV', where: 'environment variable RANKWISE_TOKEN' }),
  )
})

function expectDerivedPorts({ masterPort, portCount, jobId }: EnvironmentRendezvous): void {
  expect(portCount).toBe(8)
  expect(masterPort).toBeGreaterThanOrEqual(12_288)
  expect(masterPort + 8).toBeLessThanOrEqual(32_768)
  expect(jobId).toMatch(/^[0-9a-f]{64}$/)
}
