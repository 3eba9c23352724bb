import { fileURLToPath } from 'node:url'
import data from '../labels.json' with { type: 'json' }

/** Folder of the pipeline in the layout that diffusers writes (`model_index.json`, `transformer/`, `vae/`, …). */
export const directory: string = fileURLToPath(new URL('../pipeline', import.meta.url))

/** The call options this small pipeline was trained for; the defaults of the real models are not for it. */
export const callOptions = {
  height: 64,
  width: 64,
  numInferenceSteps: 12,
  guidanceScale: 3,
  maxSequenceLength: 32,
} as const

/** The words that the pipeline knows; it was trained on captions made of one object and one background colour. */
export interface Labels {
  /** 72 objects, such as `cat` or `ice cream`. */
  readonly objects: readonly string[]
  /** 10 background colours, such as `blue`. */
  readonly colors: readonly string[]
}

/** What the pipeline can be asked for, as in `labels.json`. */
export const labels: Labels = data
