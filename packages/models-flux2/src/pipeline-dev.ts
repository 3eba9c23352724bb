import { type Callable, callable, Mistral3ForConditionalGeneration } from '@rankwise/diffusion'
import { type Flux2FromPretrainedOptions, loadComponents } from './components.ts'
import type { Conditions } from './conditions.ts'
import { CALL_OPTIONS, type Flux2Options } from './generation-options.ts'
import { LOAD_OPTION_NAMES } from './load-options.ts'
import { Flux2PipelineBase, type PipelineTraits } from './pipeline-base.ts'
import type { EncodePromptOptions, Prompt } from './prompt.ts'
import { encodeDevPrompt } from './prompt-dev.ts'
import type { Request } from './request.ts'
import { predictVelocity, type Velocity } from './velocity.ts'

/**
 * FLUX.2-dev: pictures from a prompt and reference images, with the guidance scale as an input of the model. Every rank
 * calls it with the same options and gets the same picture.
 *
 *     const pipeline = await Flux2Pipeline.fromPretrained(dir, { backend })
 *     const { images } = await pipeline({ prompt: 'a cat on a blue background', guidanceScale: 2.5 })
 */
export class Flux2Pipeline extends Flux2PipelineBase<Flux2Options> {
  /**
   * Loads what is not given from a pipeline as diffusers writes it: a folder, or its id on a hub, `org/name`. With a
   * `parallelConfig`, the ranks load together or not at all. The result is called like a function.
   *
   * @throws RankwiseError `OPTION_UNKNOWN`, `OPTION_CONFLICT`, `CONFIG_NOT_FOUND`, `CONFIG_INVALID`, `PIPELINE_CLASS`,
   *   `LOAD_DIFFERS`, and those of the components
   */
  static async fromPretrained(pathOrId: string, options: Flux2FromPretrainedOptions): Promise<Callable<Flux2Pipeline>> {
    const components = await loadComponents(pathOrId, options, {
      name: 'Flux2Pipeline',
      accepted: ['Flux2Pipeline'],
      options: LOAD_OPTION_NAMES,
      textEncoder: Mistral3ForConditionalGeneration,
    })
    return callable(new Flux2Pipeline(components))
  }

  protected override get traits(): PipelineTraits {
    return {
      name: 'Flux2Pipeline',
      options: [...CALL_OPTIONS, 'guidanceScale'],
      numInferenceSteps: 50,
      guidanceScale: 4,
      textEncoderOutLayers: [10, 20, 30],
      latentOutput: 'packed',
    }
  }

  protected override encodePrompt(prompts: readonly string[], options: EncodePromptOptions): Promise<Prompt> {
    return encodeDevPrompt(prompts, this, options)
  }

  protected override velocity({ prompt, references }: Conditions, { guidanceScale }: Request): Velocity {
    return {
      predict: (state) => predictVelocity(this.transformer, state, { prompt, references, guidanceScale }),
      [Symbol.dispose]: () => {},
    }
  }
}
