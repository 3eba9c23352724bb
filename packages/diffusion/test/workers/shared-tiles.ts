import '@rankwise/collectives-local'
import { ort } from '@rankwise/backend-ort'
import { initProcessGroup, RankwiseError, readSafetensors, type Tensor } from '@rankwise/core'
import { referencePath, runRank } from '@rankwise/fixtures'
import { AutoencoderKLFlux2, type TileProgress, type TilingOptions } from '../../src/index.ts'

/** What the ranks code. */
export interface SharedTiles {
  /** Safetensors with `<name>.latents` and `<name>.image`. */
  readonly path: string
  readonly name: string
  readonly tiling: TilingOptions
}

/** Why a rank failed. */
interface Failure {
  readonly code: string
  readonly differing: unknown
}

/** What a rank got; everything that goes wrong does on rank 1. */
export interface SharedTilesResult {
  readonly decoded: Float32Array
  readonly encoded: Float32Array
  /** Of decoding. */
  readonly progress: readonly TileProgress[]
  readonly otherInput: Failure
  readonly otherTiling: Failure
  readonly aborted: Failure
}

async function failureOf(action: () => Promise<unknown>): Promise<Failure> {
  try {
    await action()
  } catch (error) {
    if (error instanceof RankwiseError) return { code: error.code, differing: error.actual.differentFromRank0 }
    throw error
  }
  return { code: 'no error', differing: undefined }
}

runRank(async ({ path, name, tiling }: SharedTiles): Promise<SharedTilesResult> => {
  await using group = await initProcessGroup({ backend: 'local' })
  await using backend = await ort({ device: 'cpu', threads: 1 })
  await using vae = await AutoencoderKLFlux2.fromPretrained(referencePath('flux2-tiny'), { subfolder: 'vae', backend })
  const goldens = await readSafetensors(path)
  const latents = goldens.get(`${name}.latents`) as Tensor
  const image = goldens.get(`${name}.image`) as Tensor
  const { collectives } = group
  const isFaulty = group.rank === 1
  const progress: TileProgress[] = []

  vae.enableTiling(tiling)
  // Begun at once: the ranks have to keep their exchanges apart.
  const [decoded, encoded] = await Promise.all([
    vae.decode(latents, { collectives, onProgress: (tile) => progress.push(tile) }),
    vae.encode(image, { collectives }),
  ])

  const others = latents.clone()
  if (isFaulty) others.data[5] = 0
  const otherInput = await failureOf(() => vae.decode(others, { collectives }))

  if (isFaulty) vae.disableTiling()
  const otherTiling = await failureOf(() => vae.decode(latents, { collectives }))
  vae.enableTiling(tiling)

  const controller = new AbortController()
  const onProgress = () => {
    if (isFaulty) controller.abort()
  }
  const aborted = await failureOf(() => vae.decode(latents, { collectives, signal: controller.signal, onProgress }))
  const [decodedData, encodedData] = [decoded.data as Float32Array, encoded.data as Float32Array]
  return { decoded: decodedData, encoded: encodedData, progress, otherInput, otherTiling, aborted }
})
