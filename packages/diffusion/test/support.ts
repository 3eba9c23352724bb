import { readFile } from 'node:fs/promises'
import { RankwiseError, readSafetensors, type Tensor } from '@rankwise/core'
import { referencePath } from '@rankwise/fixtures'

/** The tensors of a golden safetensors file, by name. */
export async function goldenTensors(...segments: readonly string[]): Promise<(name: string) => Tensor> {
  const tensors = await readSafetensors(referencePath('goldens', ...segments))
  return (name) => {
    const tensor = tensors.get(name)
    if (tensor === undefined) throw new Error(`no golden ${name} in ${segments.join('/')}`)
    return tensor
  }
}

/** A golden JSON file of the shared fixtures. */
export async function goldenJson<T>(...segments: readonly string[]): Promise<T> {
  return JSON.parse(await readFile(referencePath('goldens', ...segments), 'utf8')) as T
}

/** A golden JSON file of this package. */
export async function ownGoldenJson<T>(name: string): Promise<T> {
  return JSON.parse(await readFile(new URL(`goldens/${name}`, import.meta.url), 'utf8')) as T
}

/** Bytes of a tensor or array: equal bytes are equal bits, signs of zero included. */
function bytesOf({ buffer, byteOffset, byteLength }: ArrayBufferView): Buffer {
  return Buffer.from(buffer as ArrayBuffer, byteOffset, byteLength)
}

/** Elements whose bits differ. */
export function differingElements(actual: ArrayBufferView, expected: ArrayBufferView & { length: number }): number {
  const size = expected.byteLength / expected.length
  const a = bytesOf(actual)
  const e = bytesOf(expected)
  if (a.length !== e.length) return Number.POSITIVE_INFINITY
  let differing = 0
  for (let i = 0; i < e.length; i += size) {
    if (a.compare(e, i, i + size, i, i + size) !== 0) differing++
  }
  return differing
}

/** Code of the RankwiseError that `action` throws or rejects with. */
export async function codeOf(action: () => unknown): Promise<string> {
  try {
    await action()
  } catch (error) {
    if (error instanceof RankwiseError) return error.code
    throw error
  }
  return 'no error'
}
