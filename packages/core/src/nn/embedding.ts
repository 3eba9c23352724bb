import { embedding } from '../functional.ts'
import { Module } from '../module.ts'
import { Parameter } from '../parameter.ts'
import type { TracedTensor } from '../traced-tensor.ts'

/** A table of `entries` rows, looked up by int32 ids. */
export class Embedding extends Module {
  readonly weight: Parameter

  constructor(entries: number, width: number) {
    super()
    this.weight = new Parameter([entries, width])
  }

  /** int32 ids `[..]` to `[.., width]`. */
  override forward(ids: TracedTensor): TracedTensor {
    return embedding(ids, this.weight)
  }
}
