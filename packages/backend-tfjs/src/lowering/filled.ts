import { type Shape, sizeOf } from '@rankwise/core'
import type { Engine, Ref } from '../engine.ts'

/** A float32 tensor of equal elements. */
export function filled(engine: Engine, shape: Shape, value: number): Ref {
  return engine.write('float32', shape, new Float32Array(sizeOf(shape)).fill(value))
}
