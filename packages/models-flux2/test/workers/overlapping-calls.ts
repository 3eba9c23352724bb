import '@rankwise/collectives-local'
import { setTimeout as sleep } from 'node:timers/promises'
import { ort } from '@rankwise/backend-ort'
import { initProcessGroup, TensorParallelConfig } from '@rankwise/core'
import { callOptions, directory } from '@rankwise/demo-flux2'
import { Generator } from '@rankwise/diffusion'
import { runRank } from '@rankwise/fixtures'
import { Flux2KleinPipeline } from '../../src/index.ts'

/** Latents of each prompt, drawn one after the other and then at once. */
export interface OverlappingResult {
  readonly alone: readonly Float32Array[]
  readonly together: readonly Float32Array[]
}

runRank(async (prompts: readonly string[]): Promise<OverlappingResult> => {
  await using group = await initProcessGroup({ backend: 'local' })
  await using backend = await ort({ device: 'cpu', threads: 1 })
  const parallelConfig = new TensorParallelConfig({ tpDegree: group.worldSize })
  await using pipeline = await Flux2KleinPipeline.fromPretrained(directory, { backend, parallelConfig })
  const draw = async (prompt: string) => {
    const options = { ...callOptions, prompt, numInferenceSteps: 3, outputType: 'latent' } as const
    // Each rank is slower at another prompt, so that calls that are not kept in order meet those of the other prompt.
    const isSlow = prompts.indexOf(prompt) % group.worldSize === group.rank
    const callbackOnStepEnd = async () => {
      if (isSlow) await sleep(50)
      return undefined
    }
    const { images } = await pipeline({ ...options, generator: new Generator().manualSeed(7), callbackOnStepEnd })
    return images.data as Float32Array
  }
  const alone: Float32Array[] = []
  for (const prompt of prompts) alone.push(await draw(prompt))
  const together = await Promise.all(prompts.map(draw))
  return { alone, together }
})
