import { RankwiseError, readConfig } from '@rankwise/core'
import { parseWith } from '@rankwise/diffusion'
import { z } from 'zod'

const schema = z.looseObject({ _class_name: z.string(), is_distilled: z.boolean().default(false) })

/** What the `model_index.json` of a pipeline folder says. */
export interface ModelIndex {
  /** Class of the pipeline. */
  readonly className: string
  /** Whether the model was distilled to few steps and takes no guidance. */
  readonly isDistilled: boolean
}

/** @throws RankwiseError `CONFIG_NOT_FOUND`, `CONFIG_INVALID` */
export async function readModelIndex(directory: string): Promise<ModelIndex> {
  const config = await readConfig(directory, 'model_index.json')
  const { _class_name, is_distilled } = parseWith(schema, config, `${directory}/model_index.json`)
  return { className: _class_name, isDistilled: is_distilled }
}

/** @throws RankwiseError `PIPELINE_CLASS` when the folder is of a pipeline of other parts */
export function requireClass({ className }: ModelIndex, accepted: readonly string[], where: string): void {
  if (accepted.includes(className)) return
  throw new RankwiseError('PIPELINE_CLASS', `the folder is of a ${className}`, {
    where,
    actual: { className },
    rule: `the class in model_index.json is one of ${accepted.join(', ')}`,
    remedy: 'load it with DiffusionPipeline.fromPretrained, which picks the class',
  })
}
