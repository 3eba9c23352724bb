import { open } from 'node:fs/promises'
import { throwIfAborted } from '../abort.ts'
import { RankwiseError } from '../errors.ts'
import type { TensorType } from '../graph.ts'
import { byteSizeOf } from '../tensor.ts'
import { onDisk } from './disk-error.ts'

/** How far a save has come, in bytes of the tensors that this rank writes. */
export interface SaveProgress {
  /** The subfolder or class that is saved. */
  readonly component: string
  readonly savedBytes: number
  readonly totalBytes: number
}

/** What a save needs to know, however the weights are laid out. */
export interface SaveOptions {
  /** The subfolder or class that is saved, for progress. */
  readonly component: string
  /**
   * Text of the model's `config.json`, which is saved as it is: to parse it and write it again would turn Python's `3.0`
   * into `3`.
   */
  readonly config: string
  /** Base name of the weight files: `diffusion_pytorch_model`, `model`. */
  readonly weightsName: string
  /** Every weight of the model by name, whole, in the order of the model's parameters. */
  readonly tensors: ReadonlyMap<string, TensorType>
  /** Aborting it fails the save with `ABORTED` and leaves the folder as it was. */
  readonly signal?: AbortSignal | undefined
  /** Called after every 16 MiB, and at the end of every tensor. */
  readonly onProgress?: ((progress: SaveProgress) => void) | undefined
}

/** Refuses what is no `config.json`. @throws RankwiseError `CONFIG_INVALID` */
export function checkConfig(config: string, directory: string): void {
  let parsed: unknown
  try {
    parsed = JSON.parse(config)
  } catch (cause) {
    throw notConfig(directory, cause)
  }
  if (typeof parsed !== 'object' || parsed === null || Array.isArray(parsed)) throw notConfig(directory)
}

/** Bytes of all tensors together. */
export function bytesOf(tensors: ReadonlyMap<string, TensorType>): number {
  return [...tensors.values()].reduce((sum, { shape, dtype }) => sum + byteSizeOf(shape, dtype), 0)
}

/** What to call with the number of bytes of `tensors` that were just written. */
export function countProgress(
  tensors: ReadonlyMap<string, TensorType>,
  { component, onProgress }: SaveOptions,
): (bytes: number) => void {
  const totalBytes = bytesOf(tensors)
  let savedBytes = 0
  return (bytes) => {
    savedBytes += bytes
    onProgress?.({ component, savedBytes, totalBytes })
  }
}

/** Writes a small file that does not exist yet. @throws RankwiseError `SAVE_FAILED`, `ABORTED` */
export async function writeText(path: string, text: string, signal: AbortSignal | undefined): Promise<void> {
  throwIfAborted(signal, path)
  await onDisk(path, async () => {
    await using handle = await open(path, 'wx')
    await handle.writeFile(text)
    await handle.sync()
  })
}

function notConfig(where: string, cause?: unknown): RankwiseError {
  return new RankwiseError('CONFIG_INVALID', 'the config is not a JSON object', { where, cause })
}
