import type { ModelClass, ModelMixin, Tensor } from '@rankwise/core'
import type { Comparable } from '../compare/comparable.ts'
import type { Tolerance } from '../compare/expect-close.ts'

/** A checkpoint of the model. */
export interface ModelCheckpoint {
  readonly name: string
  /** Folder of config.json and the weights. */
  readonly directory: string
  /**
   * JSON that says what every rank holds in the reference implementation: `{ tp2: [{ [weight]: { placement: 'S(0)',
   * shape, sha256 } }] }`, with `plain` for weights that are not split and the sha256 of a shard's bytes. @default not compared
   */
  readonly shards?: string
}

/** What the reference implementation computes from one set of inputs. */
export interface ModelGolden {
  readonly name: string
  /** Outputs by name; all of them are compared. */
  readonly outputs: () => Promise<Readonly<Record<string, Tensor>>>
  /** How far outputs may be from it. @default that of float32 against another implementation */
  readonly tolerance?: Tolerance
}

/** What `defineModelConformance` tests. */
export interface ModelConformanceOptions<M extends ModelMixin = ModelMixin> {
  /** The class with its plan. */
  readonly model: ModelClass<M>
  readonly checkpoints: readonly ModelCheckpoint[]
  /** Computed in float32, unless a golden has a tolerance of its own. */
  readonly goldens: readonly ModelGolden[]
  /**
   * Runs the model on real processes: for every rank, the outputs of every golden, in their order.
   */
  readonly run: (worldSize: number) => Promise<readonly (readonly Readonly<Record<string, Comparable>>[])[]>
  /** Degrees to test at. @default [1, 2, 4] */
  readonly degrees?: readonly number[]
  /** All-reduces of `traceExample()`; `undefined` where the number is not known. @default undefined */
  readonly exchanges?: number
}
