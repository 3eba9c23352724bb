import { readFile, stat } from 'node:fs/promises'
import { z } from 'zod'
import { parseStrictJson, quoteName } from '../checkpoint/strict-json.ts'
import { whereIs } from '../checkpoint/tensor-info.ts'
import { DTYPES } from '../dtype.ts'
import { RankwiseError } from '../errors.ts'
import type { TensorType } from '../graph.ts'
import {
  headsDivide,
  localShape,
  partOf,
  partsOf,
  REPLICATED,
  type Replicated,
  type Shard,
  shard,
} from '../placement.ts'
import type { Shape } from '../tensor.ts'

/** How a saved parameter lies over the ranks' files; what several ranks hold lies in that of the first of them alone. */
export interface SavedParameter extends TensorType {
  /** Whole. */
  readonly shape: Shape
  readonly placement: Shard | Replicated
}

/** A file of a save. */
export interface SavedFile {
  /** Within the folder. */
  readonly name: string
  readonly bytes: number
}

/** What the ranks' files of one save hold together. */
export interface ShardManifest {
  /** Random, and repeated in every file, so that files of different saves are told apart. */
  readonly saveId: string
  readonly tpDegree: number
  /** By rank. */
  readonly files: readonly SavedFile[]
  /** By name, in the order of the model. */
  readonly parameters: ReadonlyMap<string, SavedParameter>
}

const FORMAT = 'rankwise-shards'
const VERSION = 1

/** As long as the header of a safetensors file may be. */
const MAX_MANIFEST_BYTES = 100_000_000

const count = z.int().nonnegative()

const HEAD = z.object({ format: z.literal(FORMAT), version: z.int().positive() })

const MANIFEST = z.object({
  save_id: z.string().min(1),
  tp_degree: z.int().positive(),
  files: z.array(z.object({ name: z.string(), bytes: count })),
  parameters: z.record(
    z.string(),
    z.object({
      dtype: z.enum(DTYPES),
      shape: z.array(count),
      shard: z
        .object({ dim: count, blocks: z.array(z.int().positive()).min(1), heads: z.int().positive().optional() })
        .optional(),
    }),
  ),
})

/** The text of a manifest. */
export function formatManifest({ saveId, tpDegree, files, parameters }: ShardManifest): string {
  const entries = [...parameters].map(([name, { dtype, shape, placement }]) => [
    name,
    placement.kind === 'shard'
      ? { dtype, shape, shard: { dim: placement.dim, blocks: placement.blocks, heads: placement.heads } }
      : { dtype, shape },
  ])
  const manifest: z.input<typeof HEAD> & z.input<typeof MANIFEST> = {
    format: FORMAT,
    version: VERSION,
    save_id: saveId,
    tp_degree: tpDegree,
    files: files.map(({ name, bytes }) => ({ name, bytes })),
    parameters: Object.fromEntries(entries),
  }
  return `${JSON.stringify(manifest, undefined, 2)}\n`
}

/**
 * Reads a manifest and checks that it agrees with itself; the files it names are not looked at.
 *
 * @throws RankwiseError `SHARDS_MANIFEST`, `SHARDS_VERSION` when a later version of Rankwise wrote it
 */
export async function readManifest(path: string): Promise<ShardManifest> {
  const json = parseStrictJson(await readText(path), {
    where: path,
    syntaxCode: 'SHARDS_MANIFEST',
    duplicateCode: 'SHARDS_MANIFEST',
    maxDepth: 16,
  })
  const { version } = parse(HEAD, json, path)
  if (version !== VERSION) {
    throw new RankwiseError('SHARDS_VERSION', 'the shards are of another version of the format', {
      where: path,
      actual: { version, supported: VERSION },
      remedy: 'load them with the version of Rankwise that saved them',
    })
  }
  const { save_id: saveId, tp_degree: tpDegree, files, parameters } = parse(MANIFEST, json, path)
  if (files.length !== tpDegree || new Set(files.map(({ name }) => name)).size !== tpDegree) {
    throw malformed(path, `${files.length} files of a save at degree ${tpDegree}`)
  }
  const entries = Object.entries(parameters).map(([name, { dtype, shape, shard: split }]) => {
    if (split !== undefined) checkSplit(split, shape, tpDegree, whereIs(path, name))
    const placement = split === undefined ? REPLICATED : shard(split.dim, split.blocks, split.heads)
    return [name, { dtype, shape, placement }] as const
  })
  return { saveId, tpDegree, files, parameters: new Map(entries) }
}

/** Whether a rank's file has a part of a parameter: of ranks that hold the same, the first one's has it. */
export function isWriter(placement: SavedParameter['placement'], rank: number, tpDegree: number): boolean {
  if (placement.kind === 'replicated') return rank === 0
  return rank === 0 || partOf(placement, rank, tpDegree) !== partOf(placement, rank - 1, tpDegree)
}

/** The tensors of one rank's file. */
export function tensorsOfRank(
  { parameters, tpDegree }: Pick<ShardManifest, 'parameters' | 'tpDegree'>,
  rank: number,
): ReadonlyMap<string, TensorType> {
  const tensors = new Map<string, TensorType>()
  for (const [name, { dtype, shape, placement }] of parameters) {
    if (!isWriter(placement, rank, tpDegree)) continue
    tensors.set(name, { dtype, shape: localShape(shape, placement, tpDegree) })
  }
  return tensors
}

/** What a rank's file says about itself. */
export function metadataOfRank(
  { saveId, tpDegree }: Pick<ShardManifest, 'saveId' | 'tpDegree'>,
  rank: number,
): Readonly<Record<string, string>> {
  return { format: 'pt', save_id: saveId, rank: String(rank), tp_degree: String(tpDegree) }
}

async function readText(path: string): Promise<string> {
  try {
    const file = await stat(path)
    // Opening a FIFO would wait for a writer.
    if (!file.isFile()) throw new Error('not a regular file')
    if (file.size > MAX_MANIFEST_BYTES) throw new Error(`it has ${file.size} bytes, more than ${MAX_MANIFEST_BYTES}`)
    return await readFile(path, 'utf8')
  } catch (cause) {
    throw new RankwiseError('SHARDS_MANIFEST', 'the manifest cannot be read', {
      where: path,
      actual: { problem: (cause as Error).message },
      cause,
    })
  }
}

function parse<T>(schema: z.ZodType<T>, json: unknown, path: string): T {
  const parsed = schema.safeParse(json)
  if (parsed.success) return parsed.data
  const issue = parsed.error.issues[0]
  throw malformed(path, `${quoteName(issue?.path.join('.') ?? '')}: ${issue?.message}`)
}

function checkSplit(
  { dim, blocks, heads }: z.output<typeof MANIFEST>['parameters'][string]['shard'] & {},
  shape: Shape,
  tpDegree: number,
  where: string,
): void {
  const size = blocks.reduce((sum, block) => sum + block, 0)
  if (size !== shape[dim]) {
    throw malformed(where, `blocks [${blocks.join(', ')}] of dim ${dim} of [${shape.join(', ')}]`)
  }
  if (heads !== undefined && !headsDivide(heads, tpDegree))
    throw malformed(where, `${heads} heads at degree ${tpDegree}`)
  const parts = partsOf(shard(dim, blocks, heads), tpDegree)
  const uneven = blocks.find((block) => block % parts !== 0)
  if (uneven !== undefined) throw malformed(where, `a block of ${uneven} at degree ${tpDegree}`)
}

function malformed(where: string, problem: string): RankwiseError {
  return new RankwiseError('SHARDS_MANIFEST', 'the manifest is malformed', {
    where,
    actual: { problem },
    rule: 'a manifest has one file per rank, and blocks that fill their dimension and that the degree divides',
  })
}
