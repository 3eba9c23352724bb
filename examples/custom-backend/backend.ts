// A whole backend in plain TypeScript, to start your own from. docs/writing-a-backend.md goes through it.
import { type Capabilities, HostBackend, type HostValues, type Segment, Tensor, type Value } from '@rankwise/core'
import { KERNELS, type Kernel } from './kernels.ts'

/** Computes in float32 with plain loops, one operation after the other. */
export class LoopBackend extends HostBackend {
  readonly name = 'loops'
  readonly supports: Capabilities = { dtypes: ['float32'] }

  protected hasOp(op: string): boolean {
    return KERNELS.has(op)
  }

  protected runSegment(segment: Segment, given: HostValues): readonly Tensor[] {
    const values = new Map(given)
    const tensorOf = ({ id }: Value) => values.get(id) as Tensor
    for (const { op, inputs, attributes, outputs } of segment.nodes) {
      const kernel = KERNELS.get(op) as Kernel
      const results = kernel(inputs.map(tensorOf), attributes as never, outputs)
      for (const [i, { id, dtype, shape }] of outputs.entries()) {
        values.set(id, new Tensor(dtype, shape, results[i] as Float32Array))
      }
    }
    return segment.outputs.map(tensorOf)
  }
}
