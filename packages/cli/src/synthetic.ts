import { access } from 'node:fs/promises'
import { homedir } from 'node:os'
import { join, resolve } from 'node:path'
import { RankwiseError } from '@rankwise/core'
import { directory as demoDirectory } from '@rankwise/demo-flux2'
import { FLUX2_PRESETS, type Flux2PresetName, writeSyntheticPipeline } from '@rankwise/models-flux2'
import { createProgress } from './progress.ts'

/** Sizes of which there are pipelines of random weights. */
export const SYNTHETIC_NAMES = Object.keys(FLUX2_PRESETS) as readonly Flux2PresetName[]

/** Where the pipeline of a size is kept. */
function syntheticDirectory(name: Flux2PresetName): string {
  return join(resolve(process.env.XDG_CACHE_HOME || join(homedir(), '.cache')), 'rankwise', 'synthetic', name)
}

/**
 * Writes the pipeline of a size unless it is there. The ranks of another launcher would all write at once.
 *
 * @throws RankwiseError `SYNTHETIC_MISSING` on a rank that was started by another launcher, and those of
 *   `writeSyntheticPipeline`
 */
export async function makeSyntheticPipeline(name: Flux2PresetName): Promise<string> {
  const directory = syntheticDirectory(name)
  if (await isWritten(directory)) return directory
  if (process.env.RANK !== undefined) {
    throw new RankwiseError('SYNTHETIC_MISSING', 'the pipeline of random weights is not written yet', {
      where: directory,
      remedy: `run rankwise generate --synthetic ${name} once without a launcher`,
    })
  }
  const progress = createProgress()
  const stop = new AbortController()
  const onSignal = () => stop.abort()
  for (const signal of SIGNALS) process.once(signal, onSignal)
  try {
    await writeSyntheticPipeline(directory, FLUX2_PRESETS[name], {
      tokenizer: join(demoDirectory, 'tokenizer'),
      signal: stop.signal,
      onProgress: (saved) => progress.save(saved),
    })
  } finally {
    progress.stop()
    for (const signal of SIGNALS) process.off(signal, onSignal)
  }
  return directory
}

const SIGNALS = ['SIGINT', 'SIGTERM'] as const

/** `model_index.json` is written last. */
async function isWritten(directory: string): Promise<boolean> {
  return access(join(directory, 'model_index.json')).then(
    () => true,
    () => false,
  )
}
