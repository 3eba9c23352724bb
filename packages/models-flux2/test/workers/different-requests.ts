import '@rankwise/collectives-local'
import { ort } from '@rankwise/backend-ort'
import { initProcessGroup, TensorParallelConfig } from '@rankwise/core'
import { callOptions, directory } from '@rankwise/demo-flux2'
import { Generator } from '@rankwise/diffusion'
import { runRank } from '@rankwise/fixtures'
import { type Flux2KleinOptions, Flux2KleinPipeline } from '../../src/index.ts'

export type Disagreement = 'prompt' | 'seed' | 'size' | 'sigmas' | 'guidance' | 'failure' | 'callback'

/** Codes with which the calls of this rank failed; `drawn` for one that did not. */
runRank(async (disagreements: readonly Disagreement[]): Promise<readonly string[]> => {
  await using group = await initProcessGroup({ backend: 'local' })
  await using backend = await ort({ device: 'cpu', threads: 1 })
  const parallelConfig = new TensorParallelConfig({ tpDegree: group.worldSize })
  await using pipeline = await Flux2KleinPipeline.fromPretrained(directory, { backend, parallelConfig })
  const changes: Readonly<Record<Disagreement, Partial<Flux2KleinOptions<'image'>>>> = {
    prompt: { prompt: 'a rocket' },
    seed: {},
    size: { width: 32 },
    sigmas: { sigmas: [1, 0.4] },
    guidance: { guidanceScale: 2 },
    failure: { numInferenceSteps: 0 },
    callback: {
      callbackOnStepEnd: () => {
        throw Object.assign(new Error('the callback failed'), { code: 'CALLBACK' })
      },
    },
  }
  const codes: string[] = []
  for (const disagreement of disagreements) {
    const generator = new Generator().manualSeed(disagreement === 'seed' ? group.rank : 0)
    const common = { ...callOptions, prompt: 'a cat', generator, numInferenceSteps: 2 }
    const options = group.rank === 1 ? { ...common, ...changes[disagreement] } : common
    const drawing = pipeline(options).then(
      () => 'drawn',
      (error: { code?: string }) => error.code ?? String(error),
    )
    codes.push(await drawing)
  }
  return codes
})
