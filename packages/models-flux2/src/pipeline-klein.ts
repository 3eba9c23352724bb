import { type Callable, callable, Qwen3ForCausalLM } from '@rankwise/diffusion'
import { type Flux2KleinComponents, type Flux2KleinFromPretrainedOptions, loadComponents } from './components.ts'
import type { Conditions } from './conditions.ts'
import { CALL_OPTIONS, type Flux2KleinOptions } from './generation-options.ts'
import { guide } from './guidance.ts'
import { LOAD_OPTION_NAMES } from './load-options.ts'
import { Flux2PipelineBase, type PipelineTraits } from './pipeline-base.ts'
import type { EncodePromptOptions, Prompt } from './prompt.ts'
import { encodeKleinPrompt } from './prompt-klein.ts'
import type { Request } from './request.ts'
import { type DenoisingState, predictVelocity, type Velocity } from './velocity.ts'

/**
 * FLUX.2-klein, distilled or guided: pictures from a prompt and reference images. Every rank calls it with the same
 * options and gets the same picture.
 *
 *     const pipeline = await Flux2KleinPipeline.fromPretrained(dir, { backend })
 *     const { images } = await pipeline({ prompt: 'a cat on a blue background' })
 */
export class Flux2KleinPipeline extends Flux2PipelineBase<Flux2KleinOptions> implements Flux2KleinComponents {
  /** Whether the model was distilled to few steps and takes no guidance. */
  readonly isDistilled: boolean

  constructor(components: Flux2KleinComponents) {
    super(components)
    this.isDistilled = components.isDistilled
  }

  /**
   * Loads what is not given from a pipeline as diffusers writes it: a folder, or its id on a hub, `org/name`. With a
   * `parallelConfig`, the ranks load together or not at all. The result is called like a function.
   *
   * @throws RankwiseError `OPTION_UNKNOWN`, `OPTION_CONFLICT`, `CONFIG_NOT_FOUND`, `CONFIG_INVALID`, `PIPELINE_CLASS`,
   *   `LOAD_DIFFERS`, and those of the components
   */
  static async fromPretrained(
    pathOrId: string,
    options: Flux2KleinFromPretrainedOptions,
  ): Promise<Callable<Flux2KleinPipeline>> {
    const components = await loadComponents(pathOrId, options, {
      name: 'Flux2KleinPipeline',
      accepted: ['Flux2KleinPipeline', 'Flux2KleinKVPipeline'],
      options: [...LOAD_OPTION_NAMES, 'isDistilled'],
      textEncoder: Qwen3ForCausalLM,
    })
    return callable(new Flux2KleinPipeline(components))
  }

  protected override get traits(): PipelineTraits {
    return {
      name: 'Flux2KleinPipeline',
      options: [...CALL_OPTIONS, 'guidanceScale', 'negativePromptEmbeds'],
      numInferenceSteps: 50,
      guidanceScale: this.isDistilled ? 1 : 4,
      textEncoderOutLayers: [9, 18, 27],
      latentOutput: 'decodable',
    }
  }

  protected override encodePrompt(prompts: readonly string[], options: EncodePromptOptions): Promise<Prompt> {
    return encodeKleinPrompt(prompts, this, options)
  }

  protected override isGuided({ guidanceScale }: Request): boolean {
    if (this.isDistilled && guidanceScale > 1 && this.isFirstRank) warnIgnored(guidanceScale)
    return !this.isDistilled && guidanceScale > 1
  }

  protected override velocity({ prompt, negative, references }: Conditions, { guidanceScale }: Request): Velocity {
    const predict = (state: DenoisingState, of: Prompt) =>
      predictVelocity(this.transformer, state, { prompt: of, references })
    return {
      predict: async (state) => {
        const velocity = await predict(state, prompt)
        return negative === undefined ? velocity : guide(velocity, await predict(state, negative), guidanceScale)
      },
      [Symbol.dispose]: () => {},
    }
  }
}

function warnIgnored(guidanceScale: number): void {
  process.emitWarning(`guidanceScale ${guidanceScale} is ignored: the model is distilled and takes no guidance`, {
    code: 'GUIDANCE_IGNORED',
  })
}
