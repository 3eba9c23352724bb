import type { Shape } from './tensor.ts'

/** A weight: it has a shape from the start and no data; a rank loads only its own slice of it. */
export class Parameter {
  readonly shape: Shape

  constructor(shape: Shape) {
    this.shape = shape
  }
}
