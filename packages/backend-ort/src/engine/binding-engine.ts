import { sameShape, Tensor } from '@rankwise/core'
import type { InferenceSession, Tensor as OrtTensor } from 'onnxruntime-node'
import type { OnnxModel, OnnxValueInfo } from '../onnx/model.ts'
import { writeModel } from '../onnx/model-writer.ts'
import type { Engine, Session } from './engine.ts'
import { loadOnnxruntime, type Onnxruntime } from './onnxruntime.ts'
import { compileError, runError, shapeError } from './session-error.ts'

/** ORT's "fatal": everything below is thrown as well and would only be repeated on stderr. */
const FATAL = 4

/** ONNX Runtime through its Node.js binding, which is there wherever it is. */
export class BindingEngine implements Engine {
  readonly name = 'binding'
  readonly threads: number
  /** The binding takes no bfloat16 and, where JavaScript has Float16Array, float16 only as such. */
  readonly target = { halfInputs: 'bits', hasLinear: false } as const
  readonly #onnxruntime: Onnxruntime

  private constructor(onnxruntime: Onnxruntime, threads: number) {
    this.#onnxruntime = onnxruntime
    this.threads = threads
  }

  static async open({ threads }: { readonly threads: number }): Promise<BindingEngine> {
    const onnxruntime = await loadOnnxruntime()
    // What ORT logs outside of sessions; it reads this once, before the first one.
    onnxruntime.env.logLevel = 'fatal'
    return new BindingEngine(onnxruntime, threads)
  }

  /** @throws RankwiseError `ORT_COMPILE` */
  async createSession(model: OnnxModel): Promise<Session> {
    try {
      const session = await this.#onnxruntime.InferenceSession.create(writeModel(model), {
        executionProviders: ['cpu'],
        intraOpNumThreads: this.threads,
        // From 'extended' on, ORT turns Add + LayerNormalization into SkipLayerNormalization, which is 2 to 5 times less
        // exact; no other of its fusions applies to what the rules emit.
        graphOptimizationLevel: 'basic',
        // A memory pattern is allocated beside the arena: without it, a FLUX.2 block peaks at 288 MB instead of 530 (1024
        // tokens, 24 heads) and is no slower.
        enableMemPattern: false,
        // Threads that spin after a run take the cores from the next session and from the other ranks.
        extra: { session: { force_spinning_stop: '1' } },
        logSeverityLevel: FATAL,
      })
      return new BindingSession(model, session, this.#onnxruntime)
    } catch (cause) {
      throw compileError(model, cause)
    }
  }

  /** The garbage collector does it. */
  recycle(): void {}

  async dispose(): Promise<void> {}
}

class BindingSession implements Session {
  readonly #model: OnnxModel
  readonly #session: InferenceSession
  readonly #onnxruntime: Onnxruntime

  constructor(model: OnnxModel, session: InferenceSession, onnxruntime: Onnxruntime) {
    this.#model = model
    this.#session = session
    this.#onnxruntime = onnxruntime
  }

  /** Blocks the event loop while it computes. */
  async run(inputs: readonly Tensor[]): Promise<readonly Tensor[]> {
    const { inputs: infos, outputs } = this.#model
    const feeds = Object.fromEntries(infos.map(({ name }, i) => [name, this.#toOrt(inputs[i] as Tensor)]))
    let results: InferenceSession.ReturnType
    try {
      results = await this.#session.run(feeds, { logSeverityLevel: FATAL })
    } catch (cause) {
      throw runError(this.#model, cause)
    }
    return outputs.map((info) => fromOrt(info, results[info.name] as OrtTensor))
  }

  async release(): Promise<void> {
    await this.#session.release()
  }

  /** Shares the data, unless that is shared with other threads, which the binding does not take. */
  #toOrt({ dtype, data: given, shape }: Tensor): OrtTensor {
    const data = given.buffer instanceof SharedArrayBuffer ? given.slice() : given
    const { Tensor } = this.#onnxruntime
    if (data instanceof Uint16Array) return new Tensor('uint16', data, shape)
    return dtype === 'int32'
      ? new Tensor('int32', data as Int32Array, shape)
      : new Tensor('float32', data as Float32Array, shape)
  }
}

function fromOrt(info: OnnxValueInfo, { data, dims }: OrtTensor): Tensor {
  const { dtype, shape } = info
  // ORT only warns when a declared shape is wrong.
  if (!sameShape(dims, shape)) throw shapeError(info, dims)
  if (data instanceof Uint16Array) return new Tensor('bfloat16', shape, data)
  return dtype === 'int32'
    ? new Tensor('int32', shape, data as Int32Array)
    : new Tensor('float32', shape, data as Float32Array)
}
