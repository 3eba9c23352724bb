import { RankwiseError, sameShape, Tensor } from '@rankwise/core'
import type { InferenceSession, Tensor as OrtTensor } from 'onnxruntime-node'
import type { OnnxModel, OnnxValueInfo } from './onnx/model.ts'
import { writeModel } from './onnx/model-writer.ts'
import { onnxruntime } from './onnxruntime.ts'

/** ORT's "fatal": everything below is thrown as well and would only be repeated on stderr. */
const FATAL = 4

export interface SessionOptions {
  /** Threads that one operation runs on. */
  readonly threads: number
}

/** An ONNX graph that ORT has loaded. Failures name the module whose operation ORT complains about, where it says so. */
export class OrtSession {
  readonly #model: OnnxModel
  readonly #session: InferenceSession

  private constructor(model: OnnxModel, session: InferenceSession) {
    this.#model = model
    this.#session = session
  }

  /** @throws RankwiseError `ORT_COMPILE` */
  static async create(model: OnnxModel, { threads }: SessionOptions): Promise<OrtSession> {
    // What ORT logs outside of sessions; it reads this once, before the first one.
    onnxruntime.env.logLevel = 'fatal'
    try {
      const session = await onnxruntime.InferenceSession.create(writeModel(model), {
        executionProviders: ['cpu'],
        intraOpNumThreads: threads,
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
      return new OrtSession(model, session)
    } catch (cause) {
      throw wrapped('ORT_COMPILE', 'ONNX Runtime cannot load the graph of a segment', model, cause)
    }
  }

  /**
   * Blocks the event loop while it computes.
   *
   * @param inputs - one tensor per input of the model
   * @returns one tensor per output of the model
   * @throws RankwiseError `ORT_RUN`, `ORT_SHAPE`
   */
  async run(inputs: readonly Tensor[]): Promise<readonly Tensor[]> {
    const { inputs: infos, outputs } = this.#model
    const feeds = Object.fromEntries(infos.map(({ name }, i) => [name, toOrt(inputs[i] as Tensor)]))
    let results: InferenceSession.ReturnType
    try {
      results = await this.#session.run(feeds, { logSeverityLevel: FATAL })
    } catch (cause) {
      throw wrapped('ORT_RUN', 'ONNX Runtime failed in a segment', this.#model, cause)
    }
    return outputs.map((info) => fromOrt(info, results[info.name] as OrtTensor))
  }

  async release(): Promise<void> {
    await this.#session.release()
  }
}

/** Shares the data. 16-bit floats go as the integers that have their bits. */
function toOrt({ dtype, data, shape }: Tensor): OrtTensor {
  if (data instanceof Uint16Array) return new onnxruntime.Tensor('uint16', data, shape)
  return dtype === 'int32'
    ? new onnxruntime.Tensor('int32', data as Int32Array, shape)
    : new onnxruntime.Tensor('float32', data as Float32Array, shape)
}

function fromOrt({ name, dtype, shape }: OnnxValueInfo, { data, dims }: OrtTensor): Tensor {
  // ORT only warns when a declared shape is wrong.
  if (!sameShape(dims, shape)) {
    throw new RankwiseError('ORT_SHAPE', 'a segment computes another shape than its graph says', {
      where: name,
      actual: { computed: dims, graph: shape },
    })
  }
  if (data instanceof Uint16Array) return new Tensor('bfloat16', shape, data)
  return dtype === 'int32'
    ? new Tensor('int32', shape, data as Int32Array)
    : new Tensor('float32', shape, data as Float32Array)
}

function wrapped(code: string, what: string, model: OnnxModel, cause: unknown): RankwiseError {
  const message = cause instanceof Error ? cause.message : String(cause)
  return new RankwiseError(code, `${what}: ${message}`, { where: placeOf(model, message), cause })
}

/** The module whose node the message names; else the modules of the graph. */
function placeOf({ nodes }: OnnxModel, message: string): string {
  // Names end in a number, so the longest that occurs is the one that is meant.
  const [named] = nodes.filter(({ name }) => message.includes(name)).sort((a, b) => b.name.length - a.name.length)
  const paths = [...new Set((named === undefined ? nodes : [named]).map(({ path }) => path || '(model)'))]
  return paths.length > 4 ? `${paths[0]} … ${paths.at(-1)} (${paths.length} modules)` : paths.join(', ')
}
