import { access } from 'node:fs/promises'
import { join } from 'node:path'
import { openPretrained, readConfig } from '@rankwise/core'

/**
 * The config of the transformer of a pipeline, or of one that stands alone.
 *
 * @param place - a folder, or an id on a hub such as `org/name`, of which only the config is downloaded
 */
export async function readTransformerConfig(place: string): Promise<unknown> {
  const repository = await openPretrained(place)
  if (repository !== undefined) {
    return readConfig(join(await repository.download({ folders: ['transformer'], weights: false }), 'transformer'))
  }
  const inPipeline = join(place, 'transformer')
  const isPipeline = await access(join(inPipeline, 'config.json')).then(
    () => true,
    () => false,
  )
  return readConfig(isPipeline ? inPipeline : place)
}
