import { randomBytes } from 'node:crypto'
import { type FileHandle, open, rename, rm } from 'node:fs/promises'
import { basename, dirname, join } from 'node:path'
import { throwIfAborted } from '../abort.ts'
import { RankwiseError } from '../errors.ts'
import type { Tensor } from '../tensor.ts'
import { SAFETENSORS_DTYPES } from './safetensors-dtype.ts'
import { LENGTH_BYTES, MAX_HEADER_BYTES, METADATA_KEY } from './safetensors-header.ts'
import { quoteName } from './strict-json.ts'

/** Options of `writeSafetensors`. */
export interface WriteSafetensorsOptions {
  /** Aborting it fails with `ABORTED` and leaves no file behind. */
  readonly signal?: AbortSignal | undefined
}

/** Names of the dtypes in headers, and their rank in the order of tensors. */
const DTYPES = new Map([...SAFETENSORS_DTYPES].map(([name, { dtype }], order) => [dtype, { name, order }]))

const MAX_CALL_BYTES = 16 * 1024 * 1024

/**
 * Writes tensors as a safetensors file, byte for byte as the reference implementation does: tensors by descending
 * alignment of their dtype, then by name, so that every element is aligned; the header padded with spaces to 8 bytes.
 *
 * The file appears complete or not at all: it is written beside `path` and renamed.
 *
 * @param metadata Free-form strings of the header; diffusers and transformers write `{ format: 'pt' }`.
 * @throws RankwiseError `SAFETENSORS_NAME`, `SAFETENSORS_HEADER_LENGTH`, `SAFETENSORS_WRITE`, `ABORTED`
 */
export async function writeSafetensors(
  path: string,
  tensors: ReadonlyMap<string, Tensor>,
  metadata?: Readonly<Record<string, string>>,
  options: WriteSafetensorsOptions = {},
): Promise<void> {
  const ordered = inFileOrder(tensors)
  checkNames(ordered, metadata, path)
  const header = headerOf(ordered, metadata, path)
  const temporary = join(dirname(path), `.${basename(path)}.${randomBytes(6).toString('hex')}.tmp`)
  try {
    await writeFile(temporary, header, ordered, options)
    await rename(temporary, path)
  } catch (cause) {
    await rm(temporary, { force: true })
    if (cause instanceof RankwiseError) throw cause
    throw new RankwiseError('SAFETENSORS_WRITE', 'the file cannot be written', {
      where: path,
      actual: { problem: (cause as Error).message },
      cause,
    })
  }
}

type NamedTensor = readonly [name: string, tensor: Tensor]

function inFileOrder(tensors: ReadonlyMap<string, Tensor>): readonly NamedTensor[] {
  return [...tensors].sort(
    ([nameA, a], [nameB, b]) =>
      dtypeOf(a).order - dtypeOf(b).order || Buffer.compare(Buffer.from(nameA), Buffer.from(nameB)),
  )
}

/** The first bytes of the file, up to the data. */
function headerOf(
  tensors: readonly NamedTensor[],
  metadata: Readonly<Record<string, string>> | undefined,
  path: string,
): Uint8Array {
  const entries: [string, unknown][] = metadata === undefined ? [] : [[METADATA_KEY, metadata]]
  let begin = 0
  for (const [name, tensor] of tensors) {
    const end = begin + tensor.byteLength
    entries.push([name, { dtype: dtypeOf(tensor).name, shape: tensor.shape, data_offsets: [begin, end] }])
    begin = end
  }
  // Written key by key: an object would sort keys that look like integers to its front.
  const json = `{${entries.map(([key, value]) => `${JSON.stringify(key)}:${JSON.stringify(value)}`).join(',')}}`
  const text = Buffer.from(json)
  const length = Math.ceil(text.length / LENGTH_BYTES) * LENGTH_BYTES
  if (length > MAX_HEADER_BYTES) {
    throw new RankwiseError('SAFETENSORS_HEADER_LENGTH', 'the header is too long', {
      where: path,
      actual: { headerBytes: length, tensors: tensors.length },
      rule: `a header has at most ${MAX_HEADER_BYTES} bytes`,
    })
  }
  const header = Buffer.alloc(LENGTH_BYTES + length, ' ')
  header.writeBigUInt64LE(BigInt(length))
  header.set(text, LENGTH_BYTES)
  return header
}

function checkNames(
  tensors: readonly NamedTensor[],
  metadata: Readonly<Record<string, string>> = {},
  path: string,
): void {
  const strings = [...tensors.map(([name]) => name), ...Object.entries(metadata).flat()]
  const broken = strings.find((text) => /\p{Surrogate}/u.test(text))
  if (broken === undefined && !tensors.some(([name]) => name === METADATA_KEY)) return
  throw new RankwiseError('SAFETENSORS_NAME', 'the name cannot be written', {
    where: path,
    actual: { name: quoteName(broken ?? METADATA_KEY) },
    rule: `names and metadata are well-formed Unicode, and ${METADATA_KEY} is not the name of a tensor`,
  })
}

async function writeFile(
  path: string,
  header: Uint8Array,
  tensors: readonly NamedTensor[],
  options: WriteSafetensorsOptions,
): Promise<void> {
  const handle = await open(path, 'wx')
  try {
    await writeAll(handle, header, options)
    for (const [, { data }] of tensors) {
      await writeAll(handle, new Uint8Array(data.buffer, data.byteOffset, data.byteLength), options)
    }
    await handle.sync()
  } finally {
    await handle.close()
  }
}

async function writeAll(handle: FileHandle, bytes: Uint8Array, { signal }: WriteSafetensorsOptions): Promise<void> {
  for (let written = 0; written < bytes.length; ) {
    throwIfAborted(signal)
    const length = Math.min(MAX_CALL_BYTES, bytes.length - written)
    written += (await handle.write(bytes, written, length)).bytesWritten
  }
}

function dtypeOf({ dtype }: Tensor): { readonly name: string; readonly order: number } {
  return DTYPES.get(dtype) as { readonly name: string; readonly order: number }
}
