import type { Engine, EngineName } from './engine.ts'
import { type Plan, planArgument } from './plan.ts'
import { runRanks } from './run-ranks.ts'

/** What rank 0 prints of a size: one all-reduce on the slowest rank, once per batch. */
interface Report {
  readonly bytes: number
  readonly microseconds: readonly number[]
}

/** Microseconds of one all-reduce, of every batch after the warm-up, by bytes. */
export async function measure(
  engine: Engine,
  ranks: number,
  plans: readonly Plan[],
  signal: AbortSignal,
): Promise<ReadonlyMap<number, readonly number[]>> {
  const printed = await printedBy(engine, ranks, plans, signal)
  const reports = printed
    .trim()
    .split('\n')
    .map((line): Report => JSON.parse(line))
  return new Map(plans.map((plan, i) => [plan.bytes, timesOf(plan, reports[i], engine.name)]))
}

async function printedBy(engine: Engine, ranks: number, plans: readonly Plan[], signal: AbortSignal): Promise<string> {
  const commands = await engine.commands(ranks, plans.map(planArgument))
  try {
    return await runRanks(commands, signal)
  } catch (cause) {
    signal.throwIfAborted()
    throw new Error(`${engine.name} failed on ${ranks} ranks:\n${(cause as Error).message}`, { cause })
  }
}

function timesOf({ bytes, batches, warmUps }: Plan, report: Report | undefined, name: EngineName): readonly number[] {
  if (report?.bytes === bytes && report.microseconds.length === batches) return report.microseconds.slice(warmUps)
  throw new Error(`${name} did not report ${batches} batches of ${bytes} bytes: ${JSON.stringify(report)}`)
}
