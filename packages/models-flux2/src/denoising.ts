import { type Collectives, profiled, RankwiseError, sameShape, Tensor, throwIfAborted } from '@rankwise/core'
import { computeEmpiricalMu, FlowMatchEulerDiscreteScheduler, modelTimestep } from '@rankwise/diffusion'
import type { DenoisingStep, Flux2CallOptions } from './generation-options.ts'
import { type LatentTensor, latentTensor } from './latent-tensor.ts'
import type { Request } from './request.ts'
import { filled, type Velocity } from './velocity.ts'

/** What a denoising goes through. */
export interface Denoising {
  /** At its first step. */
  readonly scheduler: FlowMatchEulerDiscreteScheduler
  readonly velocity: Velocity
  /** Packed noise, `[batch, tokens, channels]`. */
  readonly noise: LatentTensor
  /** int32 `[tokens, 4]` */
  readonly ids: Tensor<'int32'>
  readonly collectives: Collectives | undefined
  readonly signal: AbortSignal | undefined
  readonly callbackOnStepEnd: Flux2CallOptions['callbackOnStepEnd']
}

/**
 * A schedule of its own for a picture of so many tokens, so that calls that overlap do not share a position in it.
 *
 * @throws RankwiseError `SCHEDULER_SIGMAS`
 */
export function scheduleFor(
  { config }: FlowMatchEulerDiscreteScheduler,
  imageTokens: number,
  { numInferenceSteps, sigmas }: Pick<Request, 'numInferenceSteps' | 'sigmas'>,
): FlowMatchEulerDiscreteScheduler {
  const scheduler = new FlowMatchEulerDiscreteScheduler(config)
  scheduler.setTimesteps({ numInferenceSteps, sigmas, mu: computeEmpiricalMu(imageTokens, numInferenceSteps) })
  scheduler.setBeginIndex(0)
  return scheduler
}

/**
 * From noise to latents, `[batch, tokens, channels]`, step by step. When a rank fails here, be it in its
 * callback, the others fail as well instead of waiting for it.
 */
export async function* denoise(denoising: Denoising): AsyncGenerator<DenoisingStep, LatentTensor, void> {
  const { scheduler, noise, ids, collectives, signal, callbackOnStepEnd } = denoising
  using velocity = denoising.velocity
  const totalSteps = scheduler.timesteps.length
  const batch = noise.shape[0] as number
  let latents = noise
  try {
    for (const [step, timestep] of scheduler.timesteps.entries()) {
      throwIfAborted(signal)
      const time = filled(batch, modelTimestep(timestep, latents.dtype))
      const state = { latents, ids, timestep: time, signal }
      const predicted = await profiled({ category: 'stage', name: `step ${step + 1}` }, () => velocity.predict(state))
      latents = scheduler.step(predicted, timestep, latents)
      const replacement = await callbackOnStepEnd?.({ step, totalSteps, timestep, latents })
      if (replacement !== undefined) {
        latents = checkedReplacement(replacement, { step, latents }).clone()
        await collectives?.broadcast(latents, { source: 0, signal })
      }
      yield { step, totalSteps, timestep, latents }
    }
    return latents
  } catch (error) {
    collectives?.abort(error as Error)
    throw error
  }
}

/**
 * What a callback returned, instead of the latents of a step. Not all callers have types: what diffusers takes here is a
 * dictionary.
 *
 * @throws RankwiseError `OPTION_INVALID`, `LATENTS_SHAPE`, `DTYPE_UNSUPPORTED`
 */
function checkedReplacement(
  returned: unknown,
  { step, latents: { shape } }: Pick<DenoisingStep, 'step' | 'latents'>,
): LatentTensor {
  const where = 'callbackOnStepEnd'
  if (!(returned instanceof Tensor)) {
    throw new RankwiseError('OPTION_INVALID', 'what it returned is no Tensor', {
      where,
      actual: { step, returned: returned === null ? 'null' : typeof returned },
      rule: 'it returns the latents that replace those of the step, or undefined',
    })
  }
  if (sameShape(returned.shape, shape)) return latentTensor(returned, where)
  throw new RankwiseError('LATENTS_SHAPE', 'the latents that it returned do not fit the picture', {
    where,
    actual: { step, returned: returned.shape, expected: shape },
    rule: 'they are packed as the latents of the step are, [batch, tokens, channels]',
  })
}
