import '@rankwise/collectives-local'
import { ort } from '@rankwise/backend-ort'
import { runRank } from '@rankwise/conformance/ranks'
import { type Backend, initProcessGroup, type ProcessGroup, TensorParallelConfig } from '@rankwise/core'
import { callOptions, directory } from '@rankwise/demo-flux2'
import { Generator } from '@rankwise/diffusion'
import { loadGolden, referencePath } from '@rankwise/fixtures'
import { Flux2KleinPipeline } from '@rankwise/models-flux2'
import { transformerInputs } from '../../../models-flux2/test/golden-inputs.ts'
import { TappedTransformer } from '../../../models-flux2/test/tapped-transformer.ts'
import { tfjs } from '../../src/index.ts'

export interface RankRequest {
  readonly backend: 'ort' | 'wasm' | 'native'
  /** Transformers to run on inputs of their goldens, beside the picture. */
  readonly transformers: readonly { readonly checkpoint: string; readonly golden: string }[]
  readonly prompt: string
  readonly steps: number
}

export interface RankResult {
  /** RGB bytes of the demo picture. */
  readonly image: Uint8Array
  /** `out` of every transformer. */
  readonly outputs: readonly Float32Array[]
  /** What the backend holds after the models were disposed. */
  readonly left: { readonly weightBytes: number; readonly executables: number }
}

/** Draws the demo picture and runs transformers, on this rank. */
runRank(async ({ backend: name, transformers, ...picture }: RankRequest): Promise<RankResult> => {
  await using group = await initProcessGroup({ backend: 'local' })
  await using backend = await createBackend(name)
  const image = await draw(group, backend, picture)
  const outputs: Float32Array[] = []
  for (const { checkpoint, golden } of transformers) outputs.push(await transform(group, backend, checkpoint, golden))
  const { weightBytes, executables } = backend.memory()
  return { image, outputs, left: { weightBytes, executables } }
})

async function createBackend(name: RankRequest['backend']): Promise<Backend> {
  return name === 'ort' ? ort({ device: 'cpu', threads: 1 }) : tfjs({ engine: name, threads: 1 })
}

async function draw(
  { worldSize }: ProcessGroup,
  backend: Backend,
  { prompt, steps }: Pick<RankRequest, 'prompt' | 'steps'>,
): Promise<Uint8Array> {
  const parallelConfig = new TensorParallelConfig({ tpDegree: worldSize })
  await using pipeline = await Flux2KleinPipeline.fromPretrained(directory, { backend, parallelConfig })
  const generator = new Generator().manualSeed(42)
  const { images } = await pipeline({ ...callOptions, prompt, generator, numInferenceSteps: steps })
  return images[0].data
}

async function transform(
  { worldSize }: ProcessGroup,
  backend: Backend,
  checkpoint: string,
  golden: string,
): Promise<Float32Array> {
  await using model = await TappedTransformer.fromPretrained(referencePath(checkpoint), {
    subfolder: 'transformer',
    backend,
    parallelConfig: new TensorParallelConfig({ tpDegree: worldSize }),
  })
  const { out } = await model.taps(transformerInputs(await loadGolden(golden), model.config.guidanceEmbeds))
  return out?.data as Float32Array
}
