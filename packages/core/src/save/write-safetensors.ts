import { randomBytes } from 'node:crypto'
import { rename, rm } from 'node:fs/promises'
import { basename, dirname, join } from 'node:path'
import type { Tensor } from '../tensor.ts'
import { onDisk } from './disk-error.ts'
import { SafetensorsWriter } from './safetensors-writer.ts'

/** Options of `writeSafetensors`. */
export interface WriteSafetensorsOptions {
  /** Aborting it fails with `ABORTED` and leaves no file behind. */
  readonly signal?: AbortSignal | undefined
}

/**
 * Writes tensors as a safetensors file, byte for byte as the reference implementation does. The file appears complete or
 * not at all: it is written beside `path` and renamed.
 *
 * @param metadata Free-form strings of the header; diffusers and transformers write `{ format: 'pt' }`.
 * @throws RankwiseError `SAFETENSORS_NAME`, `SAFETENSORS_HEADER_LENGTH`, `SAVE_FAILED`, `ABORTED`
 */
export async function writeSafetensors(
  path: string,
  tensors: ReadonlyMap<string, Tensor>,
  metadata?: Readonly<Record<string, string>>,
  { signal }: WriteSafetensorsOptions = {},
): Promise<void> {
  const temporary = join(dirname(path), `.${basename(path)}.${randomBytes(6).toString('hex')}.tmp`)
  try {
    await using writer = await SafetensorsWriter.create(path, tensors, { metadata, temporary, signal })
    for (const name of writer.names) await writer.write(name, tensors.get(name) as Tensor)
    await writer.finish()
    await onDisk(path, () => rename(temporary, path))
  } catch (error) {
    await rm(temporary, { force: true })
    throw error
  }
}
