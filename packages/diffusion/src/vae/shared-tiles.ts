import { createHash } from 'node:crypto'
import {
  byteSizeOf,
  bytesOf,
  type Collectives,
  type DType,
  RankwiseError,
  type RunOptions,
  type Shape,
  Tensor,
  throwIfAborted,
  turns,
} from '@rankwise/core'

/** How far a rank is with its tiles. */
export interface TileProgress {
  readonly finishedTiles: number
  /** Tiles of this rank; 1 for a picture that is not cut. */
  readonly totalTiles: number
}

/** Options of `decode` and `encode`. */
export interface AutoencoderRunOptions extends RunOptions {
  /**
   * Ranks that share the tiles of a large picture: every rank calls with the same input, which is compared, and gets the
   * same output. A picture that is not cut is coded by every rank. @default the rank codes all tiles
   */
  readonly collectives?: Collectives | undefined
  /** Called after every tile of this rank. */
  readonly onProgress?: ((progress: TileProgress) => void) | undefined
}

/** Work that ranks share. */
export interface TileWork {
  /** What the ranks have to agree on, beside the input. */
  readonly name: string
  readonly input: Tensor
  /** Shapes of the outputs, by tile. */
  readonly shapes: readonly Shape[]
  readonly dtype: DType
  /** Whether the ranks share the tiles, instead of each running all. */
  readonly isShared: boolean
  readonly run: (tile: number) => Promise<Tensor>
}

/** Bytes of a sha256. */
const HASH_BYTES = 32

/**
 * The outputs of all tiles. With several ranks, each runs every so manieth tile and gets the others'. A rank that fails
 * makes the others fail as well, instead of letting them wait for it.
 *
 * @throws RankwiseError `INPUTS_DIFFER` on every rank, `ABORTED`, and those of `run` and of the collectives
 */
export async function runTiles(work: TileWork, options: AutoencoderRunOptions): Promise<readonly Tensor[]> {
  const { collectives, signal } = options
  const all = [...work.shapes.keys()]
  if (collectives === undefined || collectives.worldSize === 1) return runOwn(work, all, options)
  using _turn = await turns.take(collectives)
  await requireSameInput(work, collectives, signal)
  try {
    if (!work.isShared) return await runOwn(work, all, options)
    const own = tilesOfRank(work, collectives.rank, collectives.worldSize)
    return await exchange(work, await runOwn(work, own, options), collectives, signal)
  } catch (error) {
    collectives.abort(error as Error)
    throw error
  }
}

/** In turn, so that each rank has about as many full tiles as the others. */
function tilesOfRank({ shapes }: TileWork, rank: number, worldSize: number): number[] {
  return [...shapes.keys()].filter((tile) => tile % worldSize === rank)
}

async function runOwn(
  { run }: TileWork,
  tiles: readonly number[],
  { signal, onProgress }: AutoencoderRunOptions,
): Promise<Tensor[]> {
  const outputs: Tensor[] = []
  for (const tile of tiles) {
    throwIfAborted(signal)
    outputs.push(await run(tile))
    onProgress?.({ finishedTiles: outputs.length, totalTiles: tiles.length })
  }
  return outputs
}

/** Ranks that code different pictures would get one made of both, and nobody would notice. */
async function requireSameInput(
  { name, input }: TileWork,
  collectives: Collectives,
  signal: AbortSignal | undefined,
): Promise<void> {
  const hash = createHash('sha256').update(`${name} ${input.dtype} [${input.shape.join()}]`).update(bytesOf(input))
  const all = await collectives.allGather(new Tensor('uint8', [1, HASH_BYTES], hash.digest()), { signal })
  const hashes = Array.from({ length: collectives.worldSize }, (_, rank) =>
    Buffer.from(all.data as Uint8Array)
      .subarray(rank * HASH_BYTES, (rank + 1) * HASH_BYTES)
      .toString('hex'),
  )
  const different = hashes.flatMap((hash, rank) => (hash === hashes[0] ? [] : [rank]))
  if (different.length === 0) return
  throw new RankwiseError('INPUTS_DIFFER', 'the ranks share tiles of different pictures', {
    where: 'AutoencoderKLFlux2',
    actual: { rank: collectives.rank, differentFromRank0: different },
    rule: 'all ranks that share tiles have the same input, tiling and dtype',
  })
}

/** Every rank's outputs, one behind the other, gathered at once: all ranks give as many bytes as the one with most. */
async function exchange(
  work: TileWork,
  own: readonly Tensor[],
  collectives: Collectives,
  signal: AbortSignal | undefined,
): Promise<readonly Tensor[]> {
  const { shapes, dtype } = work
  const ranks = Array.from({ length: collectives.worldSize }, (_, rank) =>
    tilesOfRank(work, rank, collectives.worldSize),
  )
  const bytesOfTile = (tile: number) => byteSizeOf(shapes[tile] as Shape, dtype)
  const most = Math.max(...ranks.map((tiles) => tiles.reduce((bytes, tile) => bytes + bytesOfTile(tile), 0)))
  const sent = Tensor.zeros('uint8', [1, most])
  let end = 0
  for (const output of own) {
    sent.data.set(bytesOf(output), end)
    end += output.byteLength
  }
  const received = bytesOf(await collectives.allGather(sent, { signal }))
  const outputs: Tensor[] = []
  for (const [rank, tiles] of ranks.entries()) {
    let start = rank * most
    for (const tile of tiles) {
      const output = Tensor.zeros(dtype, shapes[tile] as Shape)
      bytesOf(output).set(received.subarray(start, start + output.byteLength))
      outputs[tile] = output
      start += output.byteLength
    }
  }
  return outputs
}
