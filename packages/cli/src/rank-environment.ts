/** Where the ranks of this machine are among those of all. */
export interface Machine {
  /** Number of ranks on each machine. */
  readonly nprocPerNode: number
  /** Number of machines. */
  readonly nnodes: number
  /** Number of this machine, from 0. */
  readonly nodeRank: number
}

/** What all ranks of one attempt share. */
export interface Attempt {
  readonly masterAddr: string
  readonly masterPort: number
  readonly token: string
  readonly timeoutMs: number | undefined
  readonly restartCount: number
  readonly maxRestarts: number
}

/** Variables of launchers that may have started this one: its ranks are not theirs. */
const OF_OTHER_LAUNCHERS = [
  'OMPI_COMM_WORLD_RANK',
  'PMI_RANK',
  'SLURM_PROCID',
  'TORCHELASTIC_RUN_ID',
  'TORCHELASTIC_USE_AGENT_STORE',
]

/** The variables by which a rank finds its group, by the names of torchrun; undefined ones are removed. */
export function rankEnvironment(
  localRank: number,
  { nprocPerNode, nnodes, nodeRank }: Machine,
  attempt: Attempt,
): Readonly<Record<string, string | undefined>> {
  return {
    ...Object.fromEntries(OF_OTHER_LAUNCHERS.map((name) => [name, undefined])),
    RANK: String(nodeRank * nprocPerNode + localRank),
    LOCAL_RANK: String(localRank),
    WORLD_SIZE: String(nnodes * nprocPerNode),
    LOCAL_WORLD_SIZE: String(nprocPerNode),
    MASTER_ADDR: attempt.masterAddr,
    MASTER_PORT: String(attempt.masterPort),
    RANKWISE_TOKEN: attempt.token,
    TORCHELASTIC_RESTART_COUNT: String(attempt.restartCount),
    TORCHELASTIC_MAX_RESTARTS: String(attempt.maxRestarts),
    ...(attempt.timeoutMs === undefined ? {} : { RANKWISE_TIMEOUT_MS: String(attempt.timeoutMs) }),
  }
}
