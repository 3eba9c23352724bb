import {
  checkPlan,
  formatPlacement,
  legalDegreesOf,
  type PlacedGraph,
  type PlanReport,
  partition,
  planReport,
  printGraph,
  REPLICATED,
} from '@rankwise/core'
import { directory as demoDirectory } from '@rankwise/demo-flux2'
import { Flux2Transformer2DModel } from '@rankwise/models-flux2'
import { Command } from 'commander'
import { integer } from '../parse-options.ts'
import { readTransformerConfig } from '../transformer-config.ts'

interface PlanOptions {
  readonly tp: number
  readonly imageTokens: number
  readonly textTokens: number
  readonly graph?: true
  readonly json?: true
}

export function planCommand(): Command {
  return new Command('plan')
    .description('show how a transformer is split over ranks; reads its config, no weights')
    .argument(
      '[folder]',
      'pipeline or transformer: a folder, or an id on a hub (default: the demo pipeline)',
      demoDirectory,
    )
    .option('--tp <n>', 'ranks that share the transformer', integer(1), 1)
    .option('--image-tokens <n>', 'image tokens to count with (4096: 1024 x 1024 pixels)', integer(1), 4096)
    .option('--text-tokens <n>', 'text tokens to count with', integer(1), 512)
    .option('--graph', 'print the traced graph with all placements')
    .option('--json', 'print the report for programs')
    .action(run)
}

async function run(folder: string, options: PlanOptions): Promise<void> {
  const model = Flux2Transformer2DModel.fromConfig(await readTransformerConfig(folder))
  const placements = checkPlan(Flux2Transformer2DModel, model, options.tp, true)
  const placed = partition(model.trace(options), placements, options.tp)
  const report = { ...planReport(placed), legalDegrees: legalDegreesOf(Flux2Transformer2DModel, model) }
  if (options.graph === true) process.stdout.write(printGraph(placed))
  else if (options.json === true) process.stdout.write(`${JSON.stringify(report)}\n`)
  else process.stdout.write(`${formatPlan(placed, report)}\n`)
}

function formatPlan(placed: PlacedGraph, report: PlanReport & { readonly legalDegrees: readonly number[] }): string {
  const millions = (count: number) => `${(count / 1e6).toFixed(2)} M`
  const width = Math.max(...placed.parameters.map(({ name }) => name?.length ?? 0))
  const weights = placed.parameters
    .filter(({ placement }) => placement !== REPLICATED)
    .map(({ name, shape, localShape, placement }) => {
      return `  ${name?.padEnd(width)}  ${formatPlacement(placement).padEnd(32)} [${shape}] -> [${localShape}]`
    })
  const replicated = placed.parameters.length - weights.length
  return [
    `${placed.name} on ${report.tpDegree} ${report.tpDegree === 1 ? 'rank' : 'ranks'}; legal degrees: ${report.legalDegrees.join(', ')}`,
    ...weights,
    `  ${replicated} other weights are replicated`,
    `weights per rank   ${millions(report.localWeights)} of ${millions(report.fullWeights)} elements (${millions(report.replicatedWeights)} replicated)`,
    `all-reduces        ${report.allReduces} per forward, ${millions(report.allReduceElements)} elements from each rank`,
    `operations         ${(report.flops / 1e9).toFixed(2)} GFLOP per forward on each rank`,
    `activations        ${millions(report.peakActivations)} elements alive at once`,
  ].join('\n')
}
