import type { Tensor } from '@rankwise/core'
import type { OnnxModel } from '../onnx/model.ts'
import type { GraphTarget } from '../onnx/onnx-builder.ts'

/** What calls ONNX Runtime: our addon, through the C API, or the Node.js binding that comes with it. */
export type EngineName = 'capi' | 'binding'

/** Calls ONNX Runtime on values of `M`: tensors of the host, or buffers of a GPU. */
export interface Engine<M = Tensor> {
  readonly name: EngineName
  /** Threads that one operation runs on. */
  readonly threads: number
  /** What its graphs may have. */
  readonly target: GraphTarget
  /** @throws RankwiseError `ORT_COMPILE` */
  createSession(model: OnnxModel): Promise<Session<M>>
  /** Takes back the memory of a result that nothing reads or writes any more. */
  recycle(result: M): void
  /** Frees what it holds, after its sessions were released; idempotent. */
  dispose(): Promise<void>
}

/** An ONNX graph that ONNX Runtime has loaded. Failures name the module whose operation it complains about, where it says so. */
export interface Session<M = Tensor> {
  /**
   * Runs once. Nothing may write to the inputs meanwhile.
   *
   * @param inputs - one per input of the model
   * @returns one per output of the model, in memory of its own
   * @throws RankwiseError `ORT_RUN`, `ORT_SHAPE`
   */
  run(inputs: readonly M[]): Promise<readonly M[]>
  /** Frees it, after its runs have ended. */
  release(): Promise<void>
}
