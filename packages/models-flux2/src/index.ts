export { type Flux2TransformerConfig, parseFlux2TransformerConfig } from './config.ts'
export type { DenoisingStep, Flux2KleinOptions, OutputType } from './generation-options.ts'
export type { Flux2Output } from './output.ts'
export {
  type Flux2KleinComponents,
  type Flux2KleinFromPretrainedOptions,
  type Flux2KleinModels,
  Flux2KleinPipeline,
} from './pipeline-klein.ts'
export { flux2Plan } from './plan.ts'
export { rotaryTables } from './rotary-tables.ts'
export { Flux2Transformer2DModel, type Flux2TransformerInputs } from './transformer.ts'
