import { RankwiseError } from '../errors.ts'
import { refuseOtherFormats } from './checkpoint-files.ts'

/** What diffusers and PEFT call the files of a LoRA or another adapter. */
const ADAPTER_FILE = /^adapter_(config\.json|model\.\w+)$|lora.*\.(safetensors|bin|pt)$/i

/** Weights that PEFT and diffusers put into or beside the Linears of a base model. */
const ADAPTER_WEIGHT =
  /(^|\.)(lora_(A|B|E|down|up|embedding_A|embedding_B|magnitude_vector)|lora|lokr_\w+|hada_\w+|ia3_l|base_layer)(\.|$)/

/**
 * Says what a place is that has not the files of a model: a folder, a repository, or one file.
 *
 * @param entries - names of its files
 * @throws RankwiseError `ADAPTERS_UNSUPPORTED` when it has an adapter, `CHECKPOINT_FORMAT` when it has weights of other
 *   formats only
 */
export function refuseForeignCheckpoint(location: string, entries: readonly string[]): void {
  const adapters = entries.filter((entry) => ADAPTER_FILE.test(entry))
  if (adapters.length > 0) throw adaptersUnsupported(location, { found: adapters.slice(0, 10) })
  refuseOtherFormats(location, entries)
}

/** Refuses weights of adapters: left out, the model would draw other pictures. @throws RankwiseError `ADAPTERS_UNSUPPORTED` */
export function refuseAdapterWeights(location: string, names: readonly string[]): void {
  const adapters = names.filter((name) => ADAPTER_WEIGHT.test(name))
  if (adapters.length > 0) throw adaptersUnsupported(location, { weights: adapters.length, first: adapters[0] })
}

function adaptersUnsupported(where: string, actual: Readonly<Record<string, unknown>>): RankwiseError {
  return new RankwiseError('ADAPTERS_UNSUPPORTED', 'this is an adapter, or has one in it', {
    where,
    actual,
    rule: ADAPTERS_RULE,
    remedy: 'fuse the adapter into the base model (fuse_lora and unload_lora_weights in diffusers) and save that',
  })
}

/** Why no adapter can be loaded. */
export const ADAPTERS_RULE =
  'a plan covers the Linears of the base model; adapter weights would stay whole and give wrong sums'
