import { RankwiseError } from '@rankwise/core'
import type { Exchange } from './exchange.ts'
import type { Turn } from './turn.ts'

/** Bytes of what a rank says to the others. */
const NOTE_BYTES = 2048

/** What a rank says: where the others find what it made, what went wrong, or nothing. */
export interface Note<L> {
  readonly location?: L
  readonly error?: { readonly code: string; readonly message: string }
}

/** What opening takes on one rank. `T` is the memory, `L` where other ranks find it. */
export interface Opening<T, L> {
  /** The rank that creates the memory. */
  readonly owner: number
  readonly create: () => T
  readonly locate: (memory: T) => L
  /** Opens the memory of the owner; undefined on ranks that do not take part. */
  readonly open: ((location: L) => T) | undefined
  /** Frees the memory on this rank. */
  readonly free: (memory: T) => void
}

/**
 * One rank creates memory and the others open it: all succeed, or none keeps anything. A failure is the same on every
 * rank and leaves the group in step, so it is returned, not thrown.
 */
export async function openTogether<T, L>(
  exchange: Exchange,
  turn: Turn,
  { rank, worldSize }: { readonly rank: number; readonly worldSize: number },
  { owner, create, locate, open, free }: Opening<T, L>,
): Promise<T | RankwiseError | undefined> {
  let memory: T | undefined
  const attempt = (step: () => Note<L>): Note<L> => {
    try {
      return step()
    } catch (error) {
      const { code = 'SHARED_MEMORY', message } = error as RankwiseError
      return { error: { code, message } }
    }
  }
  const create_ = () => {
    memory = create()
    return { location: locate(memory) }
  }
  try {
    const created = await tell(exchange, turn, worldSize, rank === owner ? attempt(create_) : {})
    const { location } = created[owner] as Note<L>
    const opened = await tell(
      exchange,
      turn,
      worldSize,
      attempt(() => {
        if (location !== undefined && rank !== owner) memory = open?.(location)
        return {}
      }),
    )
    const failure = firstFailure([...created, ...opened], worldSize)
    if (failure === undefined) return memory
    if (memory !== undefined) free(memory)
    return failure
  } catch (error) {
    if (memory !== undefined) free(memory)
    throw error
  }
}

/** What every rank says, in rank order. */
export async function tell<L>(exchange: Exchange, turn: Turn, worldSize: number, note: Note<L>): Promise<Note<L>[]> {
  const input = new Uint8Array(NOTE_BYTES)
  const { error } = note
  // JSON escapes make a character up to six bytes long.
  const short = error === undefined ? note : { error: { ...error, message: error.message.slice(0, NOTE_BYTES / 8) } }
  new TextEncoder().encodeInto(JSON.stringify(short), input)
  const output = new Uint8Array(NOTE_BYTES * worldSize)
  await exchange.allGather(turn, input, output)
  return Array.from({ length: worldSize }, (_, rank) => {
    const bytes = output.subarray(rank * NOTE_BYTES, (rank + 1) * NOTE_BYTES)
    const text = new TextDecoder().decode(bytes.subarray(0, bytes.indexOf(0)))
    return JSON.parse(text) as Note<L>
  })
}

/** The first failure of several rounds of notes. */
export function firstFailure<L>(notes: readonly Note<L>[], worldSize: number): RankwiseError | undefined {
  const index = notes.findIndex(({ error }) => error !== undefined)
  const error = notes[index]?.error
  if (error === undefined) return undefined
  const rank = index % worldSize
  return new RankwiseError(error.code, `rank ${rank} failed: ${error.message}`, { actual: { ranks: [rank] } })
}
