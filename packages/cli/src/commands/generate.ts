import { realpath } from 'node:fs/promises'
import { checkPlan, RankwiseError } from '@rankwise/core'
import { callOptions, directory as demoDirectory } from '@rankwise/demo-flux2'
import { Image } from '@rankwise/diffusion'
import { type Flux2PresetName, Flux2Transformer2DModel } from '@rankwise/models-flux2'
import { Command, Option } from 'commander'
import { BACKEND_NAMES } from '../backends.ts'
import { type GenerationRequest, generate } from '../generation.ts'
import { launch } from '../launcher.ts'
import { requireOutputs } from '../output-files.ts'
import { collect, dtypes, finiteNumber, integer, type NamedDTypes, seed } from '../parse-options.ts'
import { formatSummary } from '../summary.ts'
import { makeSyntheticPipeline, SYNTHETIC_NAMES } from '../synthetic.ts'
import { readTransformerConfig } from '../transformer-config.ts'

interface GenerateOptions {
  readonly prompt: string
  readonly image?: readonly string[]
  readonly synthetic?: Flux2PresetName
  readonly tp: number
  readonly backend: string
  readonly threads?: number
  readonly dtype?: NamedDTypes
  readonly lowMemory?: true
  readonly seed: bigint
  readonly steps?: number
  readonly height?: number
  readonly width?: number
  readonly guidance?: number
  readonly maxSequenceLength?: number
  readonly out: string
  readonly profile?: true
  readonly trace?: string
  readonly json?: true
}

export function generateCommand(): Command {
  return (
    new Command('generate')
      .description('draw a picture from a prompt, on one or several ranks of this machine')
      .argument(
        '[pipeline]',
        'pipeline as diffusers writes it: a folder, or an id on a hub (default: the demo pipeline)',
      )
      .option('--prompt <text>', 'what to draw', 'a cat on a blue background')
      .option('--image <file>', 'reference image, PNG or JPEG; several times for several', collect)
      .addOption(
        new Option(
          '--synthetic <size>',
          'a pipeline of random weights, to measure time and memory of a real size: written once, kept in the cache',
        ).choices(SYNTHETIC_NAMES),
      )
      .option('--tp <n>', 'ranks that share the transformer', integer(1), 1)
      .option('--backend <name>', `what computes: ${BACKEND_NAMES.join(', ')}`, 'ort')
      .option('--threads <n>', 'threads of each rank (default: all cores, shared out)', integer(1, 1024))
      .option(
        '--dtype <dtype>',
        'what the models compute in: float32 (default) or bfloat16; as vae=float32, one of transformer, text-encoder and vae; several times for several',
        dtypes,
      )
      .option('--low-memory', 'load the text encoder for the prompt alone, and free it before the denoising')
      // Help prints defaults as JSON, which has no bigint.
      .addOption(new Option('--seed <n>', 'seed of the noise, as in torch').argParser(seed).default(42n, '42'))
      .option('--steps <n>', "denoising steps (default: the pipeline's)", integer(1, 100_000))
      .option('--height <pixels>', "height (default: the pipeline's)", integer(1, 16_384))
      .option('--width <pixels>', "width (default: the pipeline's)", integer(1, 16_384))
      .option('--guidance <scale>', "guidance scale (default: the pipeline's)", finiteNumber)
      .option('--max-sequence-length <n>', "text tokens (default: the pipeline's)", integer(1, 16_384))
      .option('--out <file>', 'PNG to write', 'output.png')
      .option('--profile', 'print where the time of every rank went')
      .option('--trace <file>', 'write what every rank did, for chrome://tracing or ui.perfetto.dev')
      .option('--json', 'print a summary for programs')
      .action(run)
  )
}

async function run(pipeline: string | undefined, options: GenerateOptions): Promise<void> {
  const request = await requestOf(pipeline, options)
  await requireOutputs(request)
  await requireReadable(options.image ?? [])
  if (process.env.RANK === undefined && options.tp > 1) {
    await checkDegree(request)
    // Every rank runs this same command; with RANK set it takes the other branch.
    const command = [process.execPath, ...process.execArgv, ...process.argv.slice(1)]
    process.exitCode = await launch({ command, nprocPerNode: options.tp, prefix: true, inheritRank0: true })
    return
  }
  const summary = await generate(request)
  if (Number(process.env.RANK ?? 0) !== 0) return
  process.stdout.write(`${options.json === true ? JSON.stringify(summary) : formatSummary(summary)}\n`)
}

async function requestOf(pipeline: string | undefined, options: GenerateOptions): Promise<GenerationRequest> {
  const directory = await directoryOf(pipeline, options)
  const given = {
    image: options.image,
    height: options.height,
    width: options.width,
    numInferenceSteps: options.steps,
    guidanceScale: options.guidance,
    maxSequenceLength: options.maxSequenceLength,
  }
  const chosen = Object.fromEntries(Object.entries(given).filter(([, value]) => value !== undefined))
  return {
    directory,
    tpDegree: options.tp,
    backend: options.backend,
    threads: options.threads,
    dtype: options.dtype ?? {},
    lowMemory: options.lowMemory ?? false,
    seed: options.seed,
    out: options.out,
    profile: options.profile ?? false,
    trace: options.trace,
    // The demo was trained for a small size; other pipelines have diffusers' defaults.
    call: { prompt: options.prompt, ...((await isDemo(directory)) ? callOptions : {}), ...chosen },
  }
}

/** @throws RankwiseError `OPTION_CONFLICT`, and those of `makeSyntheticPipeline` */
async function directoryOf(pipeline: string | undefined, { synthetic }: GenerateOptions): Promise<string> {
  if (synthetic === undefined) return pipeline ?? demoDirectory
  if (pipeline === undefined) return makeSyntheticPipeline(synthetic)
  throw new RankwiseError('OPTION_CONFLICT', 'there are two pipelines to draw with', {
    where: '--synthetic',
    actual: { pipeline, synthetic },
    rule: 'give a pipeline or --synthetic',
  })
}

/** Whether a folder is that of the demo, by whatever path. */
async function isDemo(directory: string): Promise<boolean> {
  const [given, demo] = await Promise.all([directory, demoDirectory].map((path) => realpath(path).catch(() => path)))
  return given === demo
}

/** Refuses reference images before a model is loaded. @throws RankwiseError `IMAGE_READ`, `IMAGE_FORMAT`, `IMAGE_TOO_LARGE` */
async function requireReadable(images: readonly string[]): Promise<void> {
  for (const path of images) await Image.open(path)
}

/** Refuses a degree once, before ranks are started that would all say the same. */
async function checkDegree({ directory, tpDegree }: GenerationRequest): Promise<void> {
  const config = await readTransformerConfig(directory)
  checkPlan(Flux2Transformer2DModel, Flux2Transformer2DModel.fromConfig(config), tpDegree, true)
}
