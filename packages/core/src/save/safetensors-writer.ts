import { type FileHandle, open } from 'node:fs/promises'
import { throwIfAborted } from '../abort.ts'
import { SAFETENSORS_DTYPES } from '../checkpoint/safetensors-dtype.ts'
import { LENGTH_BYTES, MAX_HEADER_BYTES, METADATA_KEY } from '../checkpoint/safetensors-header.ts'
import { quoteName } from '../checkpoint/strict-json.ts'
import { whereIs } from '../checkpoint/tensor-info.ts'
import { RankwiseError } from '../errors.ts'
import type { TensorType } from '../graph.ts'
import { byteSizeOf, sameShape, type Tensor } from '../tensor.ts'
import { onDisk } from './disk-error.ts'

/** Options of `SafetensorsWriter.create`. */
export interface SafetensorsWriterOptions {
  /** Free-form strings of the header; diffusers and transformers write `{ format: 'pt' }`. @default none */
  readonly metadata?: Readonly<Record<string, string>> | undefined
  /** Where it is written, when it is renamed later to the path that errors name. @default that path */
  readonly temporary?: string
  /** Aborting it fails writing with `ABORTED`. */
  readonly signal?: AbortSignal | undefined
  /** Called with the number of bytes of tensors that were written since the last call. */
  readonly onBytes?: ((bytes: number) => void) | undefined
}

/** Names of the dtypes in headers, and their rank in the order of tensors. */
const DTYPES = new Map([...SAFETENSORS_DTYPES].map(([name, { dtype }], order) => [dtype, { name, order }]))

const MAX_CALL_BYTES = 16 * 1024 * 1024

/**
 * Bytes after which the disk is made to catch up. What is not on disk yet has to get there before a file can be closed:
 * without this, closing 10 GB took 100 s on a disk of 100 MB/s, and so did an abort.
 */
const SYNC_BYTES = 32 * 1024 * 1024

/**
 * Writes a safetensors file tensor by tensor, so that one of them at a time is in memory. The bytes are those of the
 * reference implementation: tensors by descending alignment of their dtype, then by name, so that every element is
 * aligned; the header padded with spaces to 8 bytes.
 */
export class SafetensorsWriter implements AsyncDisposable {
  /** The order in which tensors have to be written. */
  readonly names: readonly string[]
  readonly path: string
  readonly #tensors: ReadonlyMap<string, TensorType>
  readonly #handle: FileHandle
  readonly #signal: AbortSignal | undefined
  readonly #onBytes: ((bytes: number) => void) | undefined
  #next = 0
  #unsyncedBytes = 0
  #sync: Promise<void> = Promise.resolve()
  #closing: Promise<void> | undefined

  private constructor(
    path: string,
    tensors: ReadonlyMap<string, TensorType>,
    handle: FileHandle,
    { signal, onBytes }: SafetensorsWriterOptions,
  ) {
    this.path = path
    this.names = [...tensors.keys()]
    this.#tensors = tensors
    this.#handle = handle
    this.#signal = signal
    this.#onBytes = onBytes
  }

  /**
   * Creates a file that does not exist yet and writes its header.
   *
   * @param tensors All tensors of the file, in any order.
   * @throws RankwiseError `SAFETENSORS_NAME`, `SAFETENSORS_HEADER_LENGTH`, `SAVE_FAILED`, `ABORTED`
   */
  static async create(
    path: string,
    tensors: ReadonlyMap<string, TensorType>,
    options: SafetensorsWriterOptions = {},
  ): Promise<SafetensorsWriter> {
    const ordered = inFileOrder(tensors)
    checkNames(ordered, options.metadata, path)
    const header = headerOf(ordered, options.metadata, path)
    throwIfAborted(options.signal, path)
    const handle = await onDisk(path, () => open(options.temporary ?? path, 'wx'))
    const writer = new SafetensorsWriter(path, ordered, handle, options)
    try {
      await writer.#writeAll(header)
      return writer
    } catch (error) {
      await writer[Symbol.asyncDispose]()
      throw error
    }
  }

  /**
   * Writes the next tensor of `names`.
   *
   * @throws RankwiseError `SAVE_TENSOR` when it is not what was announced, `SAVE_FAILED`, `ABORTED`
   */
  async write(name: string, { dtype, shape, data }: Tensor): Promise<void> {
    const announced = this.#tensors.get(name)
    if (this.names[this.#next] !== name || announced?.dtype !== dtype || !sameShape(announced.shape, shape)) {
      throw new RankwiseError('SAVE_TENSOR', 'the tensor is not the one to be saved here', {
        where: whereIs(this.path, name),
        actual: { dtype, shape, announced: announced && `${announced.dtype} [${announced.shape.join(', ')}]` },
        rule: `the next tensor is ${quoteName(this.names[this.#next] ?? 'none')}, of the dtype and shape in the header`,
      })
    }
    this.#next++
    await this.#writeAll(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), this.#onBytes)
  }

  /**
   * Makes sure that the file is on disk and closes it.
   *
   * @throws RankwiseError `SAVE_TENSOR` when tensors are missing, `SAVE_FAILED`, `ABORTED`
   */
  async finish(): Promise<void> {
    const missing = this.names[this.#next]
    if (missing !== undefined) {
      throw new RankwiseError('SAVE_TENSOR', 'the tensor was not written', { where: whereIs(this.path, missing) })
    }
    throwIfAborted(this.#signal, this.path)
    await onDisk(this.path, async () => {
      await this.#sync
      await this.#handle.sync()
      await this.#close()
    })
  }

  /** Closes the file, finished or not; idempotent. */
  async [Symbol.asyncDispose](): Promise<void> {
    // An unfinished file is given up: why it is unfinished matters, not that it cannot even be closed.
    await this.#close().catch(() => {})
  }

  #close(): Promise<void> {
    this.#closing ??= this.#handle.close()
    return this.#closing
  }

  async #writeAll(bytes: Uint8Array, onBytes?: (bytes: number) => void): Promise<void> {
    for (let position = 0; position < bytes.length; ) {
      throwIfAborted(this.#signal, this.path)
      const length = Math.min(MAX_CALL_BYTES, bytes.length - position)
      const { bytesWritten } = await onDisk(this.path, () => this.#handle.write(bytes, position, length))
      position += bytesWritten
      await this.#syncAfter(bytesWritten)
      onBytes?.(bytesWritten)
    }
  }

  /** One sync runs beside the writes; the next waits for it. */
  async #syncAfter(bytes: number): Promise<void> {
    this.#unsyncedBytes += bytes
    if (this.#unsyncedBytes < SYNC_BYTES) return
    this.#unsyncedBytes = 0
    await onDisk(this.path, () => this.#sync)
    this.#sync = this.#handle.datasync()
    // Its failure is that of the next sync, or of `finish`; until then nobody waits for it.
    this.#sync.catch(() => {})
  }
}

function inFileOrder(tensors: ReadonlyMap<string, TensorType>): ReadonlyMap<string, TensorType> {
  return new Map(
    [...tensors].sort(
      ([nameA, a], [nameB, b]) =>
        formatOf(a).order - formatOf(b).order || Buffer.compare(Buffer.from(nameA), Buffer.from(nameB)),
    ),
  )
}

/** The first bytes of the file, up to the data. */
function headerOf(
  tensors: ReadonlyMap<string, TensorType>,
  metadata: Readonly<Record<string, string>> | undefined,
  path: string,
): Uint8Array {
  const entries: [string, unknown][] = metadata === undefined ? [] : [[METADATA_KEY, metadata]]
  let begin = 0
  for (const [name, type] of tensors) {
    const end = begin + byteSizeOf(type.shape, type.dtype)
    entries.push([name, { dtype: formatOf(type).name, shape: type.shape, data_offsets: [begin, end] }])
    begin = end
  }
  // Written key by key: an object would sort keys that look like integers to its front.
  const json = `{${entries.map(([key, value]) => `${JSON.stringify(key)}:${JSON.stringify(value)}`).join(',')}}`
  const text = Buffer.from(json)
  const length = Math.ceil(text.length / LENGTH_BYTES) * LENGTH_BYTES
  if (length > MAX_HEADER_BYTES) {
    throw new RankwiseError('SAFETENSORS_HEADER_LENGTH', 'the header is too long', {
      where: path,
      actual: { headerBytes: length, tensors: tensors.size },
      rule: `a header has at most ${MAX_HEADER_BYTES} bytes`,
    })
  }
  const header = Buffer.alloc(LENGTH_BYTES + length, ' ')
  header.writeBigUInt64LE(BigInt(length))
  header.set(text, LENGTH_BYTES)
  return header
}

function checkNames(
  tensors: ReadonlyMap<string, TensorType>,
  metadata: Readonly<Record<string, string>> = {},
  path: string,
): void {
  const strings = [...tensors.keys(), ...Object.entries(metadata).flat()]
  const broken = strings.find((text) => /\p{Surrogate}/u.test(text))
  if (broken === undefined && !tensors.has(METADATA_KEY)) return
  throw new RankwiseError('SAFETENSORS_NAME', 'the name cannot be written', {
    where: path,
    actual: { name: quoteName(broken ?? METADATA_KEY) },
    rule: `names and metadata are well-formed Unicode, and ${METADATA_KEY} is not the name of a tensor`,
  })
}

function formatOf({ dtype }: TensorType): { readonly name: string; readonly order: number } {
  return DTYPES.get(dtype) as { readonly name: string; readonly order: number }
}
