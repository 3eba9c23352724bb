export type { ComponentDTypes, ComponentName, PipelineDType } from './component-dtypes.ts'
export type {
  Flux2Components,
  Flux2FromPretrainedOptions,
  Flux2KleinComponents,
  Flux2KleinFromPretrainedOptions,
} from './components.ts'
export { type Flux2TransformerConfig, parseFlux2TransformerConfig } from './config.ts'
export { type AnyFlux2Pipeline, DiffusionPipeline } from './diffusion-pipeline.ts'
export type {
  DenoisingStep,
  Flux2CallOptions,
  Flux2KleinOptions,
  Flux2Options,
  OutputType,
} from './generation-options.ts'
export type { LatentTensor } from './latent-tensor.ts'
export type { Flux2Output } from './output.ts'
export { Flux2PipelineBase, type PipelineTraits } from './pipeline-base.ts'
export { Flux2Pipeline } from './pipeline-dev.ts'
export { Flux2KleinPipeline } from './pipeline-klein.ts'
export { Flux2KleinKVPipeline } from './pipeline-klein-kv.ts'
export { flux2Plan } from './plan.ts'
export { FLUX2_PRESETS, type Flux2Preset, type Flux2PresetName } from './presets.ts'
export { Flux2ReferenceCache } from './reference-cache.ts'
export { type EncodeReferenceOptions, encodeReferenceImages, type ReferenceImages } from './reference-images.ts'
export { rotaryTables } from './rotary-tables.ts'
export { writeSyntheticTransformer } from './synthetic-model.ts'
export { type SyntheticPipelineOptions, writeSyntheticPipeline } from './synthetic-pipeline.ts'
export type { TextEncoderPlacement } from './text-encoder.ts'
export { FullAttention } from './token-attention.ts'
export { Flux2Transformer2DModel } from './transformer.ts'
export type { Flux2ReferenceInputs, Flux2TraceSizes, Flux2TransformerInputs } from './transformer-inputs.ts'
