import { fileURLToPath } from 'node:url'
import { directory as demoDirectory, callOptions as demoOptions } from '@rankwise/demo-flux2'
import { referencePath } from '@rankwise/fixtures'
import type { PipelineRun } from './workers/pipeline.ts'

/** A run of diffusers. */
export interface PipelineCase extends PipelineRun {
  readonly name: string
  /** Golden latents and picture, without their endings. */
  readonly golden: string
}

const PROMPT = 'a photo of a cat holding a sign that says hello world'
const LARGE = { prompt: PROMPT, numInferenceSteps: 4, height: 128, width: 128 }
/** A size that is that of the first reference, where none is given. */
const BY_REFERENCE = { prompt: PROMPT, numInferenceSteps: 4, maxSequenceLength: 128 }
const SMALL = { ...BY_REFERENCE, height: 64, width: 96 }

const demo = (name: string) => fileURLToPath(new URL(`../../demo-flux2/golden/${name}`, import.meta.url))

/** @param references - how many reference images its golden has */
function run(name: string, options: PipelineRun['options'], references = 0) {
  return {
    name,
    golden: referencePath('goldens', 'pipeline', name),
    seed: 42,
    options,
    ...(references === 0 ? {} : { references: [`pipeline/${name}.safetensors`, references] as const }),
  }
}

const dev = (...args: Parameters<typeof run>): PipelineCase => ({
  ...run(...args),
  type: 'Flux2Pipeline',
  directory: referencePath('flux2-tiny'),
  textEncoderPlacement: 'sharded',
})
const ofKlein = (...args: Parameters<typeof run>) => ({
  ...run(...args),
  directory: referencePath('flux2-klein-tiny'),
})
const klein = (...args: Parameters<typeof run>): PipelineCase => ({
  ...ofKlein(...args),
  textEncoderPlacement: 'rank0',
})
const base = (...args: Parameters<typeof run>): PipelineCase => ({ ...ofKlein(...args), isDistilled: false })
const kv = (...args: Parameters<typeof run>): PipelineCase => ({ ...ofKlein(...args), type: 'Flux2KleinKVPipeline' })

/** The run in bfloat16. The text encoder is whole on every rank, as it is in diffusers. */
const BFLOAT16_CASE: PipelineCase = {
  ...dev('dev.t2i.64x96.bf16', { ...SMALL, guidanceScale: 4 }),
  textEncoderPlacement: 'replicated',
  dtype: 'bfloat16',
}

/** Those of one pipeline follow each other: it is loaded once for them. */
export const PIPELINE_CASES: readonly PipelineCase[] = [
  klein('klein.t2i.128x128.distilled', { ...LARGE, guidanceScale: 4 }),
  klein('klein.i2i.64x96.distilled', SMALL, 1),
  base('klein-base.t2i.64x96.cfg4', { ...SMALL, guidanceScale: 4 }),
  base('klein-base.i2i.64x96.cfg4', { ...SMALL, guidanceScale: 4 }, 1),
  kv('klein-kv.i2i.64x96', SMALL, 1),
  dev('dev.t2i.128x128.g4', { ...LARGE, guidanceScale: 4 }),
  dev('dev.t2i.64x96.g2.5', { ...SMALL, guidanceScale: 2.5 }),
  dev('dev.i2i.64x96.one_ref', { ...SMALL, guidanceScale: 4 }, 1),
  dev('dev.i2i.64x96.two_refs', { ...SMALL, guidanceScale: 4 }, 2),
  dev('dev.i2i.64x64.size_from_ref', { ...BY_REFERENCE, guidanceScale: 4 }, 1),
  BFLOAT16_CASE,
  {
    name: 'demo, cat on blue',
    golden: demo('cat-blue'),
    directory: demoDirectory,
    seed: 42,
    options: { ...demoOptions, prompt: 'a cat on a blue background' },
  },
  {
    name: 'demo, robot on yellow',
    golden: demo('robot-yellow'),
    directory: demoDirectory,
    seed: 7,
    options: { ...demoOptions, prompt: 'an emoji of a robot on yellow' },
  },
]

/** One with guidance, one that keeps keys and values; both have a golden in bfloat16 as well. */
export const REFERENCE_CASES: readonly PipelineCase[] = PIPELINE_CASES.filter(({ name }) =>
  ['klein-base.i2i.64x96.cfg4', 'klein-kv.i2i.64x96'].includes(name),
)

/** Enough to see that nothing depends on the number of ranks; 4 of them share the 2 cores of many machines. */
export const WIDE_CASES: readonly PipelineCase[] = PIPELINE_CASES.filter(({ name }) =>
  [
    'klein.t2i.128x128.distilled',
    'klein-kv.i2i.64x96',
    'dev.i2i.64x96.two_refs',
    'dev.t2i.64x96.bf16',
    'demo, robot on yellow',
  ].includes(name),
)
