import {
  type Backend,
  Checkpoint,
  type DeviceTensor,
  type Executable,
  type PlacedGraph,
  readConfig,
  readSafetensors,
  type Step,
  shardSlices,
  stepsOf,
  type Tensor,
  type Value,
} from '@rankwise/core'
import type { Flux2Config } from '../klein-config.ts'
import { inputsFile, weightsName } from './block-files.ts'
import { blockGraph } from './block-graph.ts'
import type { BlockCase } from './job.ts'

type Tensors = ReadonlyMap<number, DeviceTensor>

/** One step with what it takes from elsewhere. */
type BoundStep = (values: Map<number, DeviceTensor>) => Promise<void>

/** What rank 0 computes of a block. Where the ranks would sum their parts, it goes on with its own. */
export class BlockRun {
  readonly #backend: Backend
  readonly #outputs: Readonly<Record<string, Value>>
  readonly #steps: readonly BoundStep[]
  readonly #inputs: Tensors
  /** Of the last run: its inputs and everything it computed. */
  #values: Tensors = new Map()

  private constructor(backend: Backend, graph: PlacedGraph, steps: readonly BoundStep[], inputs: Tensors) {
    this.#backend = backend
    this.#outputs = graph.outputs
    this.#steps = steps
    this.#inputs = inputs
  }

  /** Loads the rank's share of the weights, compiles, and uploads the inputs. Everything is the backend's, and goes with it. */
  static async load(folder: string, blockCase: BlockCase, backend: Backend): Promise<BlockRun> {
    const graph = blockGraph((await readConfig(folder)) as Flux2Config, blockCase)
    const weights = await loadWeights(folder, blockCase, graph, backend)
    const steps: BoundStep[] = []
    for (const step of stepsOf(graph, 0)) steps.push(await bind(step, weights, backend))
    const given = await readSafetensors(inputsFile(folder, blockCase))
    const inputs = graph.inputs.map(({ id, name = '' }) => {
      return [id, backend.upload((given.get(name) as Tensor).cast('float32'))] as const
    })
    return new BlockRun(backend, graph, steps, new Map(inputs))
  }

  async run(): Promise<void> {
    this.#free()
    const values = new Map(this.#inputs)
    for (const step of this.#steps) await step(values)
    this.#values = values
  }

  /** Of the last run. */
  async results(): Promise<ReadonlyMap<string, Tensor>> {
    const results = new Map<string, Tensor>()
    for (const [name, { id }] of Object.entries(this.#outputs)) {
      results.set(name, await this.#backend.download(this.#values.get(id) as DeviceTensor))
    }
    return results
  }

  #free(): void {
    const inputs = new Set(this.#inputs.values())
    for (const tensor of this.#values.values()) if (!inputs.has(tensor)) tensor.dispose()
    this.#values = new Map()
  }
}

async function loadWeights(
  folder: string,
  blockCase: BlockCase,
  { parameters }: PlacedGraph,
  backend: Backend,
): Promise<ReadonlyMap<string, DeviceTensor>> {
  const checkpoint = await Checkpoint.open(folder, { weightsName: weightsName(blockCase) })
  try {
    const weights = new Map<string, DeviceTensor>()
    for (const { name = '', placement } of parameters) {
      const source = checkpoint.source(name, shardSlices(placement, 0, blockCase.tp))
      weights.set(name, await backend.loadShard(source, { dtype: 'float32' }))
    }
    return weights
  } finally {
    await checkpoint.close()
  }
}

async function bind(step: Step, weights: ReadonlyMap<string, DeviceTensor>, backend: Backend): Promise<BoundStep> {
  if (step.kind === 'all_reduce') {
    return async (values) => {
      for (const [i, { id }] of step.inputs.entries()) values.set((step.outputs[i] as Value).id, tensorAt(values, id))
    }
  }
  const { segment } = step
  const parameters = segment.parameters.map(({ name = '' }) => weights.get(name) as DeviceTensor)
  const executable: Executable = await backend.compile(segment, parameters)
  return async (values) => {
    const results = await executable.run(
      segment.inputs.map(({ id }) => tensorAt(values, id)),
      parameters,
    )
    for (const [i, { id }] of segment.outputs.entries()) values.set(id, results[i] as DeviceTensor)
  }
}

function tensorAt(values: Tensors, id: number): DeviceTensor {
  return values.get(id) as DeviceTensor
}
