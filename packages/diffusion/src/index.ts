export { AutoencoderKLFlux2 } from './autoencoder-kl-flux2.ts'
export { type Callable, callable } from './callable.ts'
export * from './config.ts'
export type { DecoderConfig } from './decoder/config.ts'
export {
  DecoderTextEncoder,
  type HiddenStateEncoder,
  type TextEncodeOptions,
  type TextEncoderInputs,
} from './decoder-text-encoder.ts'
export { FirstRankTextEncoder } from './first-rank-text-encoder.ts'
export { Generator, type RandnDType, randnTensor } from './generator.ts'
export { Image, type ImageInput, loadImage } from './image.ts'
export { postprocess, preprocess } from './image-processor.ts'
export * from './latents.ts'
export { linspace } from './linspace.ts'
export { Mistral3ForConditionalGeneration } from './mistral3.ts'
export { parseModelConfig } from './model-config.ts'
export { Qwen3ForCausalLM } from './qwen3.ts'
export { type LatentDType, roundingOf } from './rounding.ts'
export {
  computeEmpiricalMu,
  FlowMatchEulerDiscreteScheduler,
  modelTimestep,
  type SetTimestepsOptions,
  type StepOptions,
} from './scheduler.ts'
export type { FlowMatchEulerDiscreteSchedulerConfig } from './scheduler-config.ts'
export * from './tokenizer.ts'
export type { AutoencoderRunOptions, TileProgress } from './vae/shared-tiles.ts'
export type { Tiling, TilingOptions } from './vae/tiling.ts'
