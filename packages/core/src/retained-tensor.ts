import type { DeviceTensor } from './backend.ts'
import type { DType } from './dtype.ts'
import type { Placement } from './placement.ts'
import type { Shape } from './tensor.ts'

/**
 * A result of a run that stays where it was computed, to be an input of later runs of the same model. Where it is split
 * over the ranks, each has its own part, and nothing is exchanged. Whoever asked for it disposes of it.
 */
export class RetainedTensor implements Disposable {
  /** Of the whole value. */
  readonly shape: Shape
  readonly placement: Placement
  /** This rank's part. */
  readonly local: DeviceTensor

  constructor(shape: Shape, placement: Placement, local: DeviceTensor) {
    this.shape = shape
    this.placement = placement
    this.local = local
  }

  get dtype(): DType {
    return this.local.dtype
  }

  /** Frees the memory; idempotent. */
  dispose(): void {
    this.local.dispose()
  }

  /** `dispose`, for `using`. */
  [Symbol.dispose](): void {
    this.dispose()
  }
}
