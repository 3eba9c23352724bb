import { RankwiseError } from '../errors.ts'

/** Largest file of a saved model, as diffusers has it. */
export const DEFAULT_MAX_SHARD_SIZE = '10GB'

/** Decimal, as in `parse_size_to_int` of huggingface_hub. */
const UNIT_BYTES: Readonly<Record<string, number>> = { KB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 }

/**
 * Bytes of a size: a number of them, or a string such as '5GB', '700KB' or '1.5 MB' with decimal units.
 *
 * @throws RankwiseError `SAVE_SHARD_SIZE` when it is no size of at least one byte
 */
export function parseShardSize(size: number | string): number {
  const bytes = typeof size === 'string' ? bytesOf(size) : size
  if (bytes !== undefined && Number.isSafeInteger(bytes) && bytes >= 1) return bytes
  throw new RankwiseError('SAVE_SHARD_SIZE', 'maxShardSize is not a size', {
    actual: { maxShardSize: size },
    rule: 'maxShardSize is a positive integer of bytes, or a number followed by KB, MB, GB or TB',
  })
}

function bytesOf(size: string): number | undefined {
  const [, value, unit] = /^\s*(\d+(?:\.\d+)?)\s*([KMGT]B)\s*$/i.exec(size) ?? []
  if (value === undefined || unit === undefined) return undefined
  return Math.trunc(Number(value) * (UNIT_BYTES[unit.toUpperCase()] as number))
}
