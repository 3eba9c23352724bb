import { GroupState, type Mesh, type Message } from '@rankwise/collectives-local/internals'
import type { RankwiseError } from '@rankwise/core'
import type { Machines } from './machines.ts'

/** How long an error of MPI waits for what the connections between the ranks tell. */
const WORD_MS = 1_000

/** The state of a group whose machines exchange over MPI. */
export class MpiGroupState extends GroupState {
  readonly #mesh: Mesh
  readonly #machines: Machines
  readonly #rank: number
  /** What leaders have told for MPI, by rank and round. */
  readonly #words = new Map<string, readonly (readonly [string, string])[]>()
  readonly #waiting = new Set<() => void>()

  constructor(mesh: Mesh, machines: Machines, rank: number, timeoutMs: number) {
    super(mesh, {
      rank,
      worldSize: machines.worldSize,
      timeoutMs,
      describe: (peer) => machines.describe(peer),
      medium: 'MPI',
    })
    this.#mesh = mesh
    this.#machines = machines
    this.#rank = rank
  }

  /** MPI may end because a rank is lost, which the connections tell a little later. */
  mpiFailed(error: RankwiseError): void {
    setTimeout(() => {
      const [what = ''] = error.message.split('\n')
      const { code, rule, remedy } = error
      const failure = { code, what: `MPI failed on rank ${this.#rank}: ${what.replace(`[${code}] `, '')}` }
      this.fail({ ...failure, ranks: [this.#rank], cause: error, ...(rule && { rule }), ...(remedy && { remedy }) })
    }, WORD_MS).unref()
  }

  /**
   * What the leaders tell each other in `round`; resolves when all have spoken, and never once the group has failed:
   * MPI, which asks, would end the process over an incomplete answer.
   */
  async exchange(round: number, words: readonly (readonly [string, string])[]): Promise<Map<string, string>> {
    this.#mesh.broadcast({ round, words })
    const leaders = this.#machines.ranks.map(([leader]) => leader as number)
    const others = leaders.filter((leader) => leader !== this.#rank)
    const known = () => others.map((leader) => this.#words.get(`${leader}/${round}`))
    await new Promise<void>((resolve) => {
      const look = () => {
        if (known().includes(undefined)) return
        this.#waiting.delete(look)
        resolve()
      }
      this.#waiting.add(look)
      look()
    })
    return new Map([...words, ...known().flatMap((entries) => entries ?? [])])
  }

  override onMessage(rank: number, message: Message): void {
    if (Array.isArray(message.words)) this.#words.set(`${rank}/${message.round}`, message.words)
    super.onMessage(rank, message)
    for (const look of this.#waiting) look()
  }
}
