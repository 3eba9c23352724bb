import { RankwiseError } from '../errors.ts'
import type { Shape } from '../tensor.ts'
import { SAFETENSORS_DTYPES } from './safetensors-dtype.ts'
import { isJsonObject, parseStrictJson, quoteName } from './strict-json.ts'
import { type TensorInfo, whereIs } from './tensor-info.ts'

/** The file starts with the header's length, a little-endian u64. */
export const LENGTH_BYTES = 8

/** Longest header that the reference implementation reads (`MAX_HEADER_SIZE` of safetensors/src/tensor.rs). */
export const MAX_HEADER_BYTES = 100_000_000

/** Torch's tensors have no more dimensions; without a limit, a header could make messages of any length. */
const MAX_DIMENSIONS = 64

/** The key of the header's free-form strings; every other key is a tensor's name. */
export const METADATA_KEY = '__metadata__'

/** What a header says. */
export interface SafetensorsHeader {
  /** By position in the file. */
  readonly tensors: ReadonlyMap<string, TensorInfo>
  readonly metadata: ReadonlyMap<string, string>
}

/**
 * Reads how long the header is, from the first 8 bytes of a file.
 *
 * @throws RankwiseError `SAFETENSORS_TRUNCATED` when the file ends before the header does, `SAFETENSORS_HEADER_LENGTH`
 *   when no header can have that length
 */
export function parseHeaderLength(bytes: Uint8Array, file: string, fileSize: number): number {
  if (fileSize < LENGTH_BYTES || bytes.length < LENGTH_BYTES) {
    throw new RankwiseError('SAFETENSORS_TRUNCATED', 'the file ends before its header length', {
      where: file,
      actual: { fileBytes: fileSize },
      rule: `a safetensors file starts with ${LENGTH_BYTES} bytes of header length`,
      remedy: 'download the file again',
    })
  }
  const length = new DataView(bytes.buffer, bytes.byteOffset, LENGTH_BYTES).getBigUint64(0, true)
  if (length < 2n || length > BigInt(MAX_HEADER_BYTES)) {
    throw new RankwiseError('SAFETENSORS_HEADER_LENGTH', 'the header length is out of range', {
      where: file,
      actual: { headerBytes: `${length}` },
      rule: `a header has between 2 and ${MAX_HEADER_BYTES} bytes`,
      remedy: 'check that this is a safetensors file',
    })
  }
  if (Number(length) > fileSize - LENGTH_BYTES) {
    throw new RankwiseError('SAFETENSORS_TRUNCATED', 'the file ends within its header', {
      where: file,
      actual: { fileBytes: fileSize, headerBytes: Number(length) },
      remedy: 'download the file again',
    })
  }
  return Number(length)
}

/**
 * Parses and checks a header: after it, every tensor's bytes are known to lie in the file, to be as many as its shape
 * and dtype say, and to belong to it alone.
 *
 * @param bytes The file from its start to the end of the header or further.
 * @param file Absolute path, for messages and `TensorInfo.file`.
 * @param fileSize Bytes of the whole file.
 * @throws RankwiseError `SAFETENSORS_TRUNCATED`, `SAFETENSORS_HEADER_LENGTH`, `SAFETENSORS_HEADER_JSON`,
 *   `SAFETENSORS_DUPLICATE_KEY`, `SAFETENSORS_METADATA`, `SAFETENSORS_DTYPE`, `SAFETENSORS_SHAPE`,
 *   `SAFETENSORS_OFFSETS`, `SAFETENSORS_OVERLAP`, `SAFETENSORS_HOLE`
 */
export function parseHeader(bytes: Uint8Array, file: string, fileSize: number): SafetensorsHeader {
  const dataStart = LENGTH_BYTES + parseHeaderLength(bytes, file, fileSize)
  const json = parseHeaderJson(bytes.subarray(LENGTH_BYTES, dataStart), file)
  const infos: TensorInfo[] = []
  let metadata: ReadonlyMap<string, string> = new Map()
  // Not Object.entries: it takes seconds for hundreds of thousands of keys that look like integers.
  for (const key of Object.keys(json)) {
    if (key === METADATA_KEY) metadata = parseMetadata(json[key], file)
    else infos.push(parseTensor(key, json[key], file, dataStart))
  }
  infos.sort((a, b) => a.byteOffset - b.byteOffset || a.byteLength - b.byteLength)
  checkLayout(infos, dataStart, file, fileSize)
  return { tensors: new Map(infos.map((info) => [info.name, info])), metadata }
}

function parseHeaderJson(bytes: Uint8Array, file: string): Readonly<Record<string, unknown>> {
  const text = decodeHeader(bytes, file)
  const json = parseStrictJson(text, {
    where: `${file}, header`,
    syntaxCode: 'SAFETENSORS_HEADER_JSON',
    duplicateCode: 'SAFETENSORS_DUPLICATE_KEY',
    maxDepth: 3,
  })
  if (text[0] === '{' && isJsonObject(json)) return json
  throw new RankwiseError('SAFETENSORS_HEADER_JSON', 'the header is not a JSON object', {
    where: file,
    actual: { starts: quoteName(text.slice(0, 16)) },
    rule: 'a header starts with {',
  })
}

function decodeHeader(bytes: Uint8Array, file: string): string {
  try {
    return new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(bytes)
  } catch (cause) {
    throw new RankwiseError('SAFETENSORS_HEADER_JSON', 'the header is not valid UTF-8', { where: file, cause })
  }
}

function parseMetadata(entry: unknown, file: string): ReadonlyMap<string, string> {
  const pairs = isJsonObject(entry) ? Object.entries(entry) : undefined
  if (pairs?.every((pair): pair is [string, string] => typeof pair[1] === 'string')) return new Map(pairs)
  throw new RankwiseError('SAFETENSORS_METADATA', `${METADATA_KEY} is malformed`, {
    where: file,
    rule: `${METADATA_KEY} is an object of strings`,
  })
}

function parseTensor(name: string, entry: unknown, file: string, dataStart: number): TensorInfo {
  const where = whereIs(file, name)
  if (!isJsonObject(entry)) {
    throw new RankwiseError('SAFETENSORS_HEADER_JSON', 'the entry is not an object', {
      where,
      rule: 'a tensor has dtype, shape and data_offsets',
    })
  }
  const { dtype, bits } = parseDType(entry.dtype, where)
  const shape = parseShape(entry.shape, where)
  const [begin, end] = parseOffsets(entry.data_offsets, where)
  const byteLength = byteLengthOf(shape, bits, where)
  if (end - begin !== byteLength) {
    throw new RankwiseError('SAFETENSORS_OFFSETS', 'the bytes do not fit the shape', {
      where,
      actual: { data_offsets: [begin, end], bytes: end - begin, shape, dtype, expectedBytes: byteLength },
      rule: 'end - begin is the product of the shape times the bytes of an element',
    })
  }
  return { name, dtype, shape, file, byteOffset: dataStart + begin, byteLength }
}

function parseDType(value: unknown, where: string) {
  const dtype = typeof value === 'string' ? SAFETENSORS_DTYPES.get(value) : undefined
  if (dtype !== undefined) return dtype
  throw new RankwiseError('SAFETENSORS_DTYPE', 'the dtype is unknown', {
    where,
    actual: { dtype: describe(value) },
    rule: `dtype is one of ${[...SAFETENSORS_DTYPES.keys()].join(', ')}`,
  })
}

function parseShape(value: unknown, where: string): Shape {
  if (Array.isArray(value) && value.length <= MAX_DIMENSIONS && value.every(isCount)) return value
  throw new RankwiseError('SAFETENSORS_SHAPE', 'the shape is malformed', {
    where,
    actual: { shape: describe(value) },
    rule: `a shape is an array of at most ${MAX_DIMENSIONS} integers from 0 to 2^53 - 1`,
  })
}

function parseOffsets(value: unknown, where: string): readonly [begin: number, end: number] {
  if (Array.isArray(value) && value.length === 2 && value.every(isCount)) {
    const [begin, end] = value as [number, number]
    if (begin <= end) return [begin, end]
  }
  throw new RankwiseError('SAFETENSORS_OFFSETS', 'data_offsets are malformed', {
    where,
    actual: { data_offsets: describe(value) },
    rule: 'data_offsets are two integers from 0 to 2^53 - 1, begin <= end',
  })
}

/** Multiplies step by step: a product that leaves the safe integers is rounded and could match by accident. */
function byteLengthOf(shape: Shape, bits: number, where: string): number {
  let total = bits
  for (const size of shape) {
    total *= size
    if (!Number.isSafeInteger(total)) {
      throw new RankwiseError('SAFETENSORS_SHAPE', 'the shape overflows', {
        where,
        actual: { shape: describe(shape) },
        rule: 'a tensor has less than 2^53 bits',
      })
    }
  }
  if (total % 8 !== 0) {
    throw new RankwiseError('SAFETENSORS_SHAPE', 'the elements do not fill whole bytes', {
      where,
      actual: { shape, bitsPerElement: bits, bits: total },
    })
  }
  return total / 8
}

/** The format leaves no byte of the data unowned and none owned twice. `infos` are in the order of their offsets. */
function checkLayout(infos: readonly TensorInfo[], dataStart: number, file: string, fileSize: number): void {
  let previous: TensorInfo | undefined
  let end = dataStart
  for (const info of infos) {
    if (previous !== undefined && info.byteOffset < end) throw overlap(file, previous, info)
    if (info.byteOffset > end) throw hole(file, end, info.byteOffset, { before: info, after: previous })
    previous = info
    end = info.byteOffset + info.byteLength
  }
  if (end > fileSize) throw truncated(file, infos, end, fileSize)
  if (end < fileSize) throw hole(file, end, fileSize, { after: previous })
}

function overlap(file: string, previous: TensorInfo, info: TensorInfo): RankwiseError {
  return new RankwiseError('SAFETENSORS_OVERLAP', 'two tensors share bytes', {
    where: whereIs(file, info.name),
    actual: {
      other: quoteName(previous.name),
      otherBytes: [previous.byteOffset, previous.byteOffset + previous.byteLength],
      bytes: [info.byteOffset, info.byteOffset + info.byteLength],
    },
    rule: 'every byte of the data belongs to one tensor',
  })
}

function hole(
  file: string,
  begin: number,
  end: number,
  { after, before }: { after?: TensorInfo | undefined; before?: TensorInfo },
): RankwiseError {
  return new RankwiseError('SAFETENSORS_HOLE', 'bytes belong to no tensor', {
    where: file,
    actual: {
      bytes: [begin, end],
      after: after ? quoteName(after.name) : 'the header',
      before: before ? quoteName(before.name) : 'the end of the file',
    },
    rule: 'every byte of the data belongs to one tensor',
  })
}

function truncated(file: string, infos: readonly TensorInfo[], end: number, fileSize: number): RankwiseError {
  const cut = infos.filter((info) => info.byteOffset + info.byteLength > fileSize)
  return new RankwiseError('SAFETENSORS_TRUNCATED', 'the file ends within the data', {
    where: whereIs(file, cut[0]?.name ?? ''),
    actual: { fileBytes: fileSize, expectedBytes: end, tensorsCut: cut.length },
    remedy: 'download the file again',
  })
}

/** -0 is a safe integer for JavaScript, and no count. */
function isCount(value: unknown): value is number {
  return Number.isSafeInteger(value) && (value as number) >= 0 && !Object.is(value, -0)
}

/** A value of the header as JSON, shortened: it is not trusted to be of a sensible size. */
function describe(value: unknown): string {
  const json = JSON.stringify(value) ?? 'missing'
  return json.length > 120 ? `${json.slice(0, 120)}…` : json
}
