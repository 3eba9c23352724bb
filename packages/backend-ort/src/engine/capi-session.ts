import type { RankwiseError, TensorData } from '@rankwise/core'
import { ELEMENT_BYTES, ELEMENT_TYPES, type OnnxModel, type OnnxValueInfo } from '../onnx/model.ts'
import { writeModel } from '../onnx/model-writer.ts'
import type { Addon, NativeEngine, NativeGraph, Port } from './addon.ts'
import type { Session } from './engine.ts'
import { compileError, messageOf, runError, shapeError } from './session-error.ts'

/** Where the values of an engine are. */
export interface ValueMemory<M> {
  /** Memory for a result, with any content. */
  take(info: OnnxValueInfo): M
  /** Takes back memory that nothing reads or writes any more. */
  give(result: M): void
  /** A value as the addon takes it. */
  data(value: M): TensorData | bigint
  /** Frees what is not in use. */
  clear(): void
}

/** What a session of the addon needs of its engine. */
export interface SessionContext<M> {
  readonly addon: Addon
  readonly native: NativeEngine
  readonly memory: ValueMemory<M>
}

/** A graph that the addon has loaded. */
export class CapiSession<M> implements Session<M> {
  readonly #model: OnnxModel
  readonly #graph: NativeGraph
  readonly #context: SessionContext<M>

  private constructor(model: OnnxModel, graph: NativeGraph, context: SessionContext<M>) {
    this.#model = model
    this.#graph = graph
    this.#context = context
  }

  /** @throws RankwiseError `ORT_COMPILE` */
  static async create<M>(model: OnnxModel, context: SessionContext<M>): Promise<CapiSession<M>> {
    const { addon, native } = context
    const { inputs, outputs } = model
    const graph = addon.describe([...inputs, ...outputs].map(portOf), inputs.length)
    try {
      await addon.load(native, graph, writeModel(model))
    } catch (cause) {
      throw compileError(model, cause)
    }
    return new CapiSession(model, graph, context)
  }

  async run(inputs: readonly M[]): Promise<readonly M[]> {
    const { addon, native, memory } = this.#context
    const results: M[] = []
    try {
      for (const info of this.#model.outputs) results.push(memory.take(info))
      const data = [...inputs, ...results].map((value) => memory.data(value))
      await addon.run(native, this.#graph, data)
    } catch (cause) {
      for (const result of results) memory.give(result)
      throw computedShapeError(this.#model, cause) ?? runError(this.#model, cause)
    }
    return results
  }

  /** Memory for results of its shapes is not kept either. */
  async release(): Promise<void> {
    const { addon, native, memory } = this.#context
    memory.clear()
    await addon.unload(native, this.#graph)
  }
}

function portOf({ name, dtype, shape }: OnnxValueInfo): Port {
  return { name, elementType: ELEMENT_TYPES[dtype], itemBytes: ELEMENT_BYTES[dtype], shape }
}

/** ONNX Runtime refuses to write a result to memory for another shape, and says so in these words. */
function computedShapeError({ outputs }: OnnxModel, cause: unknown): RankwiseError | undefined {
  const match = /provided for output '(.*?)' of node .* but the computed output shape for this run is \{(.*?)\}/.exec(
    messageOf(cause),
  )
  const info = outputs.find(({ name }) => name === match?.[1])
  if (match === null || info === undefined) return undefined
  return shapeError(info, match[2]?.split(',').filter(Boolean).map(Number) ?? [])
}
