/** The model's settings, beside its weights. */
export const CONFIG_FILE = 'config.json'

/** The one file of weights that are not split into several. */
export function singleFile(weightsName: string): string {
  return `${weightsName}.safetensors`
}

/** What says which of several files a tensor is in. */
export function indexFile(weightsName: string): string {
  return `${weightsName}.safetensors.index.json`
}

/** One of `count` files of whole tensors, from 0. */
export function numberedFile(weightsName: string, i: number, count: number): string {
  return `${weightsName}-${fiveDigits(i + 1)}-of-${fiveDigits(count)}.safetensors`
}

/** What says how the ranks' files make up whole tensors. */
export function manifestFile(weightsName: string): string {
  return `${weightsName}.shards.json`
}

/** The shards of one rank, from 0. */
export function rankFile(weightsName: string, rank: number, tpDegree: number): string {
  return `${weightsName}.rank-${fiveDigits(rank)}-of-${fiveDigits(tpDegree)}.safetensors`
}

/** The ways to store a model: whole, as diffusers does, or as shards of ranks. */
export type WeightLayout = 'whole' | 'shards'

/**
 * The files of a folder that hold weights of this name in this layout; first the one that a reader starts from.
 *
 * @param entries Names of everything in the folder.
 */
export function weightFilesAmong(
  entries: readonly string[],
  weightsName: string,
  layout: WeightLayout,
): readonly string[] {
  const starts = layout === 'whole' ? [indexFile(weightsName), singleFile(weightsName)] : [manifestFile(weightsName)]
  const separator = layout === 'whole' ? '-' : '.rank-'
  const parts = entries.filter(
    (entry) =>
      entry.startsWith(`${weightsName}${separator}`) &&
      /^\d{5}-of-\d{5}\.safetensors$/.test(entry.slice(weightsName.length + separator.length)),
  )
  return [...starts.filter((start) => entries.includes(start)), ...parts]
}

function fiveDigits(number: number): string {
  return String(number).padStart(5, '0')
}
