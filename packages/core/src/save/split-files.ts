import type { TensorType } from '../graph.ts'
import { byteSizeOf } from '../tensor.ts'

/**
 * Deals tensors out to files of at most `maxBytes`, exactly as diffusers does (`split_state_dict_into_shards_factory`
 * of huggingface_hub): in the order given, never going back to fill a file. A tensor that is larger gets a file of its
 * own, which comes before the one that is being filled.
 *
 * @returns the names in each file; one file when there are no tensors
 */
export function splitIntoFiles(
  tensors: ReadonlyMap<string, TensorType>,
  maxBytes: number,
): readonly (readonly string[])[] {
  const files: string[][] = []
  let current: string[] = []
  let currentBytes = 0
  for (const [name, { dtype, shape }] of tensors) {
    const bytes = byteSizeOf(shape, dtype)
    if (bytes > maxBytes) {
      files.push([name])
      continue
    }
    if (currentBytes + bytes > maxBytes) {
      files.push(current)
      current = []
      currentBytes = 0
    }
    current.push(name)
    currentBytes += bytes
  }
  return current.length > 0 || files.length === 0 ? [...files, current] : files
}
