import { FLUX2_PRESETS } from '@rankwise/models-flux2'

/** How many blocks of FLUX.2-klein-4B's widths a model has. */
export interface Blocks {
  readonly double: number
  readonly single: number
}

/** The config of a FLUX.2 transformer, as its `config.json` has it. */
export type Flux2Config = ReturnType<typeof kleinConfig>

/** The widths of FLUX.2-klein-4B. */
export function kleinConfig({ double, single }: Blocks) {
  return { ...FLUX2_PRESETS['flux2-klein-4b'].transformer, num_layers: double, num_single_layers: single }
}
