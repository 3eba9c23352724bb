import type { ByteReader } from './byte-reader.ts'
import type { ReadStats } from './read-stats.ts'
import { LENGTH_BYTES, parseHeader, parseHeaderLength, type SafetensorsHeader } from './safetensors-header.ts'

/** Reads and checks the header of an open file. @throws RankwiseError as `SafetensorsFile.open` */
export async function readHeader(reader: ByteReader, stats: ReadStats): Promise<SafetensorsHeader> {
  const where = `${reader.path}, header`
  const start = new Uint8Array(Math.min(LENGTH_BYTES, reader.size))
  await reader.readInto(start, 0, where)
  const bytes = new Uint8Array(LENGTH_BYTES + parseHeaderLength(start, reader.path, reader.size))
  await reader.readInto(bytes, 0, where)
  stats.headerBytes += start.length + bytes.length
  return parseHeader(bytes, reader.path, reader.size)
}
