import type { RankwiseError } from '@rankwise/core'
import type { Failure, Operation } from '@rankwise/core/collectives'
import { Arena, newNonce } from './arena.ts'
import { newCursor } from './cursor.ts'
import type { SharedExchange } from './exchange.ts'
import { FailureDetector } from './failure-detector.ts'
import type { Kernel } from './kernel.ts'
import { Lockstep } from './lockstep.ts'
import type { Member } from './member.ts'
import type { Native } from './native.ts'
import { NativeExchange } from './native-exchange.ts'
import { openTogether } from './open-together.ts'
import { partBytes, SharedAllocations } from './shared-allocations.ts'
import { SharedMemory } from './shared-memory.ts'
import { StepwiseExchange } from './stepwise-exchange.ts'
import { labelOf, type TensorMemory, type Transport } from './transport.ts'
import type { Turn } from './turn.ts'

/** What a group is made of, beside its arena. */
export interface ShmGroup {
  readonly native: Native
  readonly kernel: Kernel
  /** All ranks, in rank order. */
  readonly members: readonly Member[]
  readonly rank: number
  readonly timeoutMs: number
  /** How messages tell the group from others; empty for the first one. */
  readonly label: string
}

/** Ranks that share memory: an arena to meet and to exchange in. */
export class ShmTransport implements Transport {
  readonly name = 'shm'
  readonly exchange: SharedExchange
  readonly allocations: SharedAllocations
  readonly #group: ShmGroup
  readonly #arena: Arena
  readonly #lockstep: Lockstep

  /** Takes over the arena. */
  constructor(group: ShmGroup, arena: Arena) {
    const { kernel, members, rank, timeoutMs, label } = group
    const cursor = newCursor()
    const detector = new FailureDetector(arena, members, rank)
    this.#group = group
    this.#arena = arena
    this.#lockstep = new Lockstep(arena, detector, cursor, { rank, timeoutMs, label })
    this.exchange =
      kernel.name === 'native'
        ? new NativeExchange(kernel.addon, arena, this.#lockstep, cursor, rank)
        : new StepwiseExchange(arena, this.#lockstep, cursor, rank, kernel.reduce)
    this.allocations = new SharedAllocations(this.exchange, rank, arena.worldSize)
  }

  get worldSize(): number {
    return this.#arena.worldSize
  }

  run<T>(operation: Operation, signal: AbortSignal | undefined, body: (turn: Turn) => Promise<T> | T): Promise<T> | T {
    return this.#lockstep.run(operation, signal, body)
  }

  fail(failure: Failure): void {
    this.#lockstep.fail(failure)
  }

  leave(): void {
    this.#lockstep.leave()
  }

  close(): void {
    this.allocations.releaseAll()
    this.#arena.destroy()
  }

  async allocate(turn: Turn, byteLength: number): Promise<TensorMemory | RankwiseError> {
    const { native } = this.#group
    const bytes = partBytes(byteLength) * this.worldSize
    const memory = await openTogether(this.exchange, turn, this.#place, {
      owner: 0,
      create: () => SharedMemory.create(native, bytes),
      locate: ({ descriptor }) => ({ pid: process.pid, descriptor: descriptor as number }),
      open: ({ pid, descriptor }) => SharedMemory.open(native, pid, descriptor, bytes),
      free: (opened) => opened.unmap(),
    })
    if (!(memory instanceof SharedMemory)) return memory as RankwiseError
    memory.closeDescriptor()
    return this.allocations.add(memory, byteLength)
  }

  async split(turn: Turn, members: readonly number[]): Promise<ShmTransport | RankwiseError | undefined> {
    const { native, rank } = this.#group
    const nonce = newNonce()
    const arena = await openTogether(this.exchange, turn, this.#place, {
      owner: members[0] as number,
      create: () => Arena.create(native, members.length, this.#arena.slotBytes, nonce),
      locate: (created) => created.location(nonce),
      open: members.includes(rank) ? (location) => Arena.open(native, location) : undefined,
      free: (opened) => opened.destroy(),
    })
    if (!(arena instanceof Arena)) return arena
    arena.close()
    const group = this.#group
    return new ShmTransport(
      {
        ...group,
        rank: members.indexOf(rank),
        members: members.map((member, index) => ({ ...(group.members[member] as Member), rank: index })),
        label: labelOf(group.label, members),
      },
      arena,
    )
  }

  get #place(): { readonly rank: number; readonly worldSize: number } {
    return { rank: this.#group.rank, worldSize: this.worldSize }
  }
}
