import { type Callable, callable, Qwen3ForCausalLM } from '@rankwise/diffusion'
import { type Flux2FromPretrainedOptions, loadComponents } from './components.ts'
import type { Conditions } from './conditions.ts'
import { CALL_OPTIONS, type Flux2CallOptions } from './generation-options.ts'
import { LOAD_OPTION_NAMES } from './load-options.ts'
import { Flux2PipelineBase, type PipelineTraits } from './pipeline-base.ts'
import type { EncodePromptOptions, Prompt } from './prompt.ts'
import { encodeKleinPrompt } from './prompt-klein.ts'
import { CachedVelocity, predictVelocity, type Velocity } from './velocity.ts'

/**
 * The FLUX.2-klein that reads its reference images once: the first step keeps their keys and values, and the others use
 * them. It is distilled and takes no guidance. Every rank calls it with the same options and gets the same picture.
 *
 *     const pipeline = await Flux2KleinKVPipeline.fromPretrained(dir, { backend })
 *     const { images } = await pipeline({ prompt: 'the cat as a wizard', image: 'cat.png' })
 */
export class Flux2KleinKVPipeline extends Flux2PipelineBase<Flux2CallOptions> {
  /**
   * Loads what is not given from a pipeline as diffusers writes it: a folder, or its id on a hub, `org/name`. With a
   * `parallelConfig`, the ranks load together or not at all. The result is called like a function.
   *
   * @throws RankwiseError `OPTION_UNKNOWN`, `OPTION_CONFLICT`, `CONFIG_NOT_FOUND`, `CONFIG_INVALID`, `PIPELINE_CLASS`,
   *   `LOAD_DIFFERS`, and those of the components
   */
  static async fromPretrained(
    pathOrId: string,
    options: Flux2FromPretrainedOptions,
  ): Promise<Callable<Flux2KleinKVPipeline>> {
    const components = await loadComponents(pathOrId, options, {
      name: 'Flux2KleinKVPipeline',
      accepted: ['Flux2KleinKVPipeline', 'Flux2KleinPipeline'],
      options: LOAD_OPTION_NAMES,
      textEncoder: Qwen3ForCausalLM,
    })
    return callable(new Flux2KleinKVPipeline(components))
  }

  protected override get traits(): PipelineTraits {
    return {
      name: 'Flux2KleinKVPipeline',
      options: CALL_OPTIONS,
      numInferenceSteps: 4,
      guidanceScale: 1,
      textEncoderOutLayers: [9, 18, 27],
      latentOutput: 'decodable',
    }
  }

  protected override encodePrompt(prompts: readonly string[], options: EncodePromptOptions): Promise<Prompt> {
    return encodeKleinPrompt(prompts, this, options)
  }

  protected override velocity({ prompt, references }: Conditions): Velocity {
    if (references !== undefined) return new CachedVelocity(this.transformer, prompt, references)
    return {
      predict: (state) => predictVelocity(this.transformer, state, { prompt, references }),
      [Symbol.dispose]: () => {},
    }
  }
}
