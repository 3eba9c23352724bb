import type { Capabilities } from '../backend.ts'
import { type DType, isFloatingPoint, itemSize } from '../dtype.ts'
import type { Node } from '../graph.ts'
import { HostBackend, type HostValues } from '../host-backend.ts'
import type { Segment } from '../segment.ts'
import type { Tensor } from '../tensor.ts'
import { evaluate, tensorOf, type Values } from './evaluate.ts'
import { hasReferenceOp } from './reference-op.ts'

/**
 * A backend that computes every operation in float64 with plain loops. What is in a 16-bit dtype is rounded after every
 * operation, as torch does; all else once, at the end of a segment. It is for tests and debugging: correct and readable,
 * orders of magnitude slower than a real one.
 */
export class ReferenceBackend extends HostBackend {
  readonly name: string = 'reference'
  readonly supports: Capabilities = { dtypes: ['float32', 'float64', 'bfloat16', 'float16'] }

  protected hasOp(op: string): boolean {
    return hasReferenceOp(op)
  }

  protected runSegment(segment: Segment, given: HostValues): readonly Tensor[] {
    const values: Values = new Map([...given].map(([id, tensor]) => [id, tensor.cast('float64')]))
    for (const node of segment.nodes) {
      evaluate(node, values)
      this.#roundResults(node, values)
    }
    return segment.outputs.map((output) => tensorOf(values, output).cast(output.dtype))
  }

  /** A result as the next operation gets it; another rule only where tests are tested. */
  protected rounded(result: Tensor<'float64'>, dtype: DType): Tensor<'float64'> {
    return isFloatingPoint(dtype) && itemSize(dtype) === 2 ? result.cast(dtype).cast('float64') : result
  }

  #roundResults({ outputs }: Node, values: Values): void {
    for (const output of outputs) values.set(output.id, this.rounded(tensorOf(values, output), output.dtype))
  }
}
