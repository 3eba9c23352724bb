import {
  type DeviceTensor,
  type Executable,
  RankwiseError,
  type Segment,
  type Shape,
  sameShape,
  type Tensor,
  type Value,
} from '@rankwise/core'
import { elementDType, type ValueDType } from './device-dtype.ts'
import { TfjsTensor } from './device-tensor.ts'
import type { Engine, Ref } from './engine.ts'
import type { Rules } from './lowering/rule.ts'
import { RULES } from './lowering/rules.ts'
import { planSegment, type SegmentPlan } from './segment-plan.ts'
import { SegmentRun } from './segment-run.ts'

/** How a segment is compiled. */
export interface CompileOptions {
  readonly engine: Engine
  /** @default those of the backend */
  readonly rules?: Rules | undefined
  readonly onDispose?: (executable: TfjsExecutable) => void
}

/** A checked segment with its constants in the engine. Kernels are eager: there is nothing else to compile. */
export class TfjsExecutable implements Executable {
  readonly #engine: Engine
  readonly #plan: SegmentPlan
  readonly #constants: readonly Ref[]
  readonly #onDispose: ((executable: TfjsExecutable) => void) | undefined
  readonly #running = new Set<Promise<unknown>>()
  #isDisposed = false

  /** @throws RankwiseError `OP_UNSUPPORTED`, `DTYPE_UNSUPPORTED`, `CONSTANT_MISSING` */
  constructor(segment: Segment, { engine, rules = RULES, onDispose }: CompileOptions) {
    this.#engine = engine
    this.#plan = planSegment(segment, rules, engine)
    this.#constants = segment.constants.map(({ dtype, shape, data }) => {
      const type = elementDType(dtype)
      return engine.write(type, shape, (data as Tensor).cast(type).data)
    })
    this.#onDispose = onDispose
  }

  /**
   * Runs once, on weights in whatever storage. An argument that is disposed meanwhile stays until the run has ended.
   *
   * @throws RankwiseError `EXECUTABLE_DISPOSED`, `ARGUMENT_MISMATCH`, `TENSOR_DISPOSED`, `TENSOR_FOREIGN`, `EMBEDDING_ID`,
   *   `BACKEND_MEMORY`, `TFJS_RUN`, `TFJS_SHAPE`
   */
  async run(inputs: readonly DeviceTensor[], parameters: readonly DeviceTensor[]): Promise<readonly DeviceTensor[]> {
    if (this.#isDisposed) throw new RankwiseError('EXECUTABLE_DISPOSED', 'the compiled segment was disposed')
    const running = this.#run(inputs, parameters)
    this.#running.add(running)
    try {
      return await running
    } finally {
      this.#running.delete(running)
    }
  }

  /** Fails unless the weights are those of the segment. @throws RankwiseError `ARGUMENT_MISMATCH`, `TENSOR_DISPOSED`, `TENSOR_FOREIGN` */
  checkParameters(given: readonly DeviceTensor[]): readonly TfjsTensor[] {
    const { parameters } = this.#plan.segment
    return this.#tensors('parameter', parameters, given, (dtype, value) => {
      return dtype === value.dtype || (dtype === 'bfloat16' && value.dtype === 'float32')
    })
  }

  /** Waits for runs that are under way; idempotent. */
  async dispose(): Promise<void> {
    if (this.#isDisposed) return
    this.#isDisposed = true
    await Promise.allSettled(this.#running)
    for (const ref of this.#constants) this.#engine.free(ref)
    this.#onDispose?.(this)
  }

  async #run(given: readonly DeviceTensor[], weights: readonly DeviceTensor[]): Promise<readonly DeviceTensor[]> {
    const engine = this.#engine
    const { inputs: values, outputs: results } = this.#plan.segment
    const inputs = this.#tensors('input', values, given, (dtype, value) => dtype === value.dtype)
    const parameters = this.checkParameters(weights)
    const read = [...inputs, ...parameters]
    for (const tensor of read) tensor.retain()
    try {
      const outputs = await new SegmentRun(engine, this.#plan, { inputs, parameters, constants: this.#constants }).run()
      return outputs.map((ref, i) => {
        const { dtype, shape } = results[i] as Value
        return new TfjsTensor({ engine, ref, dtype: dtype as ValueDType, shape })
      })
    } finally {
      for (const tensor of read) tensor.release()
    }
  }

  #tensors(
    kind: string,
    values: readonly Value[],
    given: readonly DeviceTensor[],
    fits: (dtype: string, value: Value) => boolean,
  ): readonly TfjsTensor[] {
    if (given.length !== values.length) {
      throw new RankwiseError('ARGUMENT_MISMATCH', `a segment takes ${values.length} ${kind}s, not ${given.length}`)
    }
    return values.map((value, i) => {
      const tensor = TfjsTensor.from(given[i] as DeviceTensor, this.#engine)
      tensor.requireAlive()
      if (fits(tensor.dtype, value) && sameShape(tensor.shape, value.shape)) return tensor
      throw new RankwiseError('ARGUMENT_MISMATCH', 'an argument is not what the segment was compiled for', {
        where: value.name ?? `${kind} ${i}`,
        actual: { given: typeText(tensor), compiled: typeText(value) },
        rule: 'arguments have the dtypes and shapes of the segment; bfloat16 weights may be computed with in float32',
      })
    })
  }
}

function typeText({ dtype, shape }: { readonly dtype: string; readonly shape: Shape }): string {
  return `${dtype}[${shape.join(', ')}]`
}
