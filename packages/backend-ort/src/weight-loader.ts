import {
  type ByteRange,
  itemSize,
  RankwiseError,
  type ShardSource,
  sizeOf,
  Tensor,
  throwIfAborted,
  viewAs,
} from '@rankwise/core'
import { FileMapper, MAX_MAPPED_BYTES } from './file-mapper.ts'
import type { ComputeDType } from './host-dtype.ts'
import { mappingError } from './mapping-error.ts'
import { loadNativeMemory } from './native-memory.ts'
import { keptDType, rowsShape, type WeightDType } from './weight-storage.ts'
import type { WeightContent } from './weight-tensor.ts'

/** Where weights lie: in the mapped file, in memory of this process, or in the file where that is possible. */
export type WeightsMode = 'auto' | 'mapped' | 'read'

const MODES: readonly WeightsMode[] = ['auto', 'mapped', 'read']

/** How a weight is loaded. */
export interface WeightLoadOptions {
  /** What it is computed in. */
  readonly dtype: ComputeDType
  readonly signal: AbortSignal | undefined
}

/** Loads weights: maps what is consecutive in a file and needs no rounding, and reads the rest. */
export class WeightLoader {
  readonly #mode: WeightsMode
  readonly #mapper: FileMapper | undefined

  /** @param mapper - undefined where files cannot be mapped */
  constructor(mode: WeightsMode, mapper: FileMapper | undefined) {
    this.#mode = mode
    this.#mapper = mapper
  }

  /** @throws RankwiseError `BACKEND_WEIGHTS`; `BACKEND_MAPPING` when `mode` is 'mapped' and nothing can be mapped here */
  static async create(mode: WeightsMode): Promise<WeightLoader> {
    if (!MODES.includes(mode)) {
      throw new RankwiseError('BACKEND_WEIGHTS', 'the backend ort cannot keep weights there', {
        actual: { weights: mode },
        rule: `weights is one of ${MODES.join(', ')}`,
      })
    }
    const native = mode === 'read' ? undefined : await unlessMapped(mode, loadNativeMemory())
    return new WeightLoader(mode, native === undefined ? undefined : new FileMapper(native))
  }

  /** @throws RankwiseError `BACKEND_MAPPING` when weights must be mapped, `ABORTED`, and those of the source */
  async load(source: ShardSource, { dtype, signal }: WeightLoadOptions): Promise<WeightContent> {
    throwIfAborted(signal)
    const kept = keptDType(source.dtype, dtype)
    const ranges = source.ranges()
    const mapped =
      this.#mapper === undefined || ranges === undefined || ranges.length === 0
        ? undefined
        : await unlessMapped(this.#mode, mapWeight(this.#mapper, source, ranges, kept))
    return mapped ?? readWeight(source, kept, signal)
  }
}

/** What `mapping` gives; undefined when it fails and weights need not be mapped. */
async function unlessMapped<T>(mode: WeightsMode, mapping: Promise<T>): Promise<T | undefined> {
  try {
    return await mapping
  } catch (error) {
    if (mode === 'mapped' || !(error instanceof RankwiseError) || error.code !== 'BACKEND_MAPPING') throw error
    return undefined
  }
}

async function mapWeight(
  mapper: FileMapper,
  source: ShardSource,
  ranges: readonly ByteRange[],
  dtype: WeightDType,
): Promise<WeightContent> {
  const { shape, file, name } = source
  const where = `${file}, tensor ${name}`
  if (source.dtype !== dtype)
    throw mappingError(where, `it is stored in ${source.dtype} and has to be cast to ${dtype}`)
  const unaligned = ranges.find(({ offset }) => offset % itemSize(dtype) !== 0)
  if (unaligned !== undefined) {
    throw mappingError(
      where,
      `its offset ${unaligned.offset} is not a multiple of the ${itemSize(dtype)} bytes of ${dtype}`,
    )
  }
  const rowBytes = sizeOf(shape.slice(1)) * itemSize(dtype)
  const windows = ranges.flatMap((range) => cutIntoRows(range, rowBytes, where))
  const mapping = await mapper.map(file, windows)
  const pieces = mapping.views.map((bytes) => {
    return new Tensor<WeightDType>(dtype, rowsShape(shape, bytes.byteLength / rowBytes), viewAs(dtype, bytes))
  })
  return { pieces, shape, mapping }
}

/** The parts of a range that can be mapped one by one: whole rows, of as many bytes as a mapping may have. */
function cutIntoRows({ offset, length }: ByteRange, rowBytes: number, where: string): readonly ByteRange[] {
  if (length % rowBytes !== 0 || rowBytes > MAX_MAPPED_BYTES) {
    throw mappingError(where, `its ranges are not whole rows of at most ${MAX_MAPPED_BYTES} bytes`)
  }
  const most = Math.floor(MAX_MAPPED_BYTES / rowBytes) * rowBytes
  return Array.from({ length: Math.ceil(length / most) }, (_, i) => ({
    offset: offset + i * most,
    length: Math.min(most, length - i * most),
  }))
}

async function readWeight(
  source: ShardSource,
  dtype: WeightDType,
  signal: AbortSignal | undefined,
): Promise<WeightContent> {
  const tensor = await source.read({ signal })
  return { pieces: [tensor.cast(dtype)], shape: tensor.shape }
}
