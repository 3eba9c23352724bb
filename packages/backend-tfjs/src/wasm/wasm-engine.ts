import type { Shape, TensorData } from '@rankwise/core'
import type { DataType, NamedAttrMap, NamedTensorInfoMap, TensorInfo } from '@tensorflow/tfjs-core'
import type { ComputeDType } from '../device-dtype.ts'
import { type BinaryOp, Engine, type EngineDType, type ReduceOp, type Ref, type UnaryOp } from '../engine.ts'
import { HEAP_BYTES, type WasmRuntime } from './wasm-runtime.ts'

interface WasmRef extends Ref {
  readonly dtype: 'float32' | 'int32'
  readonly info: TensorInfo
}

const BINARY: Readonly<Record<BinaryOp, string>> = {
  add: 'Add',
  sub: 'Sub',
  mul: 'Multiply',
  div: 'RealDiv',
  maximum: 'Maximum',
}

const UNARY: Readonly<Record<UnaryOp, string>> = {
  sigmoid: 'Sigmoid',
  sin: 'Sin',
  cos: 'Cos',
  sqrt: 'Sqrt',
  square: 'Square',
  exp: 'Exp',
}

const REDUCE: Readonly<Record<ReduceOp, string>> = { mean: 'Mean', sum: 'Sum', max: 'Max' }

/** Products that are added one after the other. */
const MOST_PRODUCTS = 3072

/** Runs the kernels of `@tensorflow/tfjs-backend-wasm`, which are XNNPACK's where it has them. One thread, float32. */
export class WasmEngine extends Engine {
  readonly name = 'wasm'
  /** tfjs starts threads of WebAssembly only in browsers. */
  readonly threads = 1
  readonly dtypes: readonly ComputeDType[] = ['float32', 'bfloat16']
  /** A quarter of a gibibyte of the heap at most, as several tensors of scores live at a time. */
  readonly maxScoreBytes: number = 2 ** 26
  readonly multipliesBfloat16 = false
  readonly maxCastBytes = 0
  /** An eighth of the heap is left for activations and for the copy that XNNPACK packs of one weight. */
  readonly maxWeightBytes: number = HEAP_BYTES - 2 ** 29
  readonly #runtime: WasmRuntime

  constructor(runtime: WasmRuntime) {
    super()
    this.#runtime = runtime
  }

  get liveTensors(): number {
    return this.#runtime.backend.numDataIds()
  }

  /** Matrices as `[in, out]`: tfjs multiplies by a transposed matrix 40 times slower. Filters as tfjs takes them. */
  weightOrder({ length }: Shape): readonly number[] | undefined {
    if (length === 2) return [1, 0]
    return length === 4 ? [2, 3, 1, 0] : undefined
  }

  weightDType(): 'float32' {
    return 'float32'
  }

  write(dtype: EngineDType, shape: Shape, data: TensorData): Ref {
    const type = dtype as 'float32' | 'int32'
    const dataId = this.#runtime.backend.write(data as Float32Array | Int32Array, [...shape], type)
    return this.#ref({ dataId, shape: [...shape], dtype: type })
  }

  read(ref: Ref): TensorData {
    return this.#runtime.backend.readSync(infoOf(ref).dataId) as TensorData
  }

  free(ref: Ref): void {
    this.#runtime.backend.disposeData(infoOf(ref).dataId)
  }

  binary(op: BinaryOp, a: Ref, b: Ref): Ref {
    return this.#run(BINARY[op], { a: infoOf(a), b: infoOf(b) })
  }

  unary(op: UnaryOp, x: Ref): Ref {
    return this.#run(UNARY[op], { x: infoOf(x) })
  }

  /**
   * In two steps: tfjs adds one number after the other, which makes a layer norm over 6144 numbers wrong by 1.1e-6 instead
   * of 2e-7.
   */
  reduce(op: ReduceOp, x: Ref): Ref {
    const [rows, width] = x.shape as [number, number]
    const step = nearRoot(width)
    const partial = this.#reduceRows(op, this.reshape(x, [(rows * width) / step, step]))
    return this.#reduceRows(op, this.reshape(partial, [rows, width / step]))
  }

  #reduceRows(op: ReduceOp, x: Ref): Ref {
    if (x.shape[1] === 1) return x
    return this.#run(REDUCE[op], { x: infoOf(x) }, { axis: [1], reductionIndices: [1], keepDims: true })
  }

  softmax(x: Ref): Ref {
    return this.#run('Softmax', { logits: infoOf(x) }, { dim: 1 })
  }

  cast(x: Ref, dtype: 'float32' | 'bfloat16'): Ref {
    return this.#run('Cast', { x: infoOf(x) }, { dtype })
  }

  /** In JavaScript, on the heap: tfjs has no kernel for it. */
  roundToBfloat16(x: Ref): Ref {
    const rounded = this.#runtime.allocate(x.shape)
    // Allocating may move the heap.
    roundWords(this.#runtime.wordsOf(infoOf(x)), this.#runtime.wordsOf(rounded))
    return this.#ref(rounded)
  }

  /** One product after the other: XNNPACK takes matrices, and tfjs's own loop over several is 5 times slower. */
  matMul(a: Ref, b: Ref, transposeB: boolean): Ref {
    const [count] = a.shape as [number]
    const right = transposeB ? this.transpose(b, [0, 2, 1]) : b
    if (count === 1) return this.#product(a, right)
    const products = Array.from({ length: count }, (_, i) => {
      return this.tidy(() => [this.#product(this.#entry(a, i), this.#entry(right, i))])[0] as Ref
    })
    return this.concat(products, 0)
  }

  #entry(x: Ref, index: number): Ref {
    return this.slice(x, [index, 0, 0], x.shape.with(0, 1) as number[])
  }

  /**
   * Sums of partial products: XNNPACK adds one product after the other, which makes a FLUX.2 block with 12288 of them wrong
   * by 2.0e-6 instead of 1.5e-6.
   *
   * @param a - `[1, m, k]`
   * @param b - `[1, k, p]`
   */
  #product(a: Ref, b: Ref): Ref {
    const [, rows, inner] = a.shape as [number, number, number]
    if (inner <= MOST_PRODUCTS) return this.#sequentialProduct(a, b)
    const columns = b.shape[2] as number
    const starts = Array.from({ length: Math.ceil(inner / MOST_PRODUCTS) }, (_, i) => i * MOST_PRODUCTS)
    const parts = starts.map((start) => {
      const count = Math.min(MOST_PRODUCTS, inner - start)
      const [part] = this.tidy(() => {
        const left = this.slice(a, [0, 0, start], [1, rows, count])
        return [this.#sequentialProduct(left, this.slice(b, [0, start, 0], [1, count, columns]))]
      })
      return part as Ref
    })
    return parts.reduce((sum, part) => this.binary('add', sum, part))
  }

  #sequentialProduct(a: Ref, b: Ref): Ref {
    const product = this.#run('BatchMatMul', { a: infoOf(a), b: infoOf(b) }, { transposeA: false, transposeB: false })
    this.#runtime.dropPacked(infoOf(b))
    return product
  }

  gather(x: Ref, ids: Ref, dim: number): Ref {
    return this.#run('GatherV2', { x: infoOf(x), indices: infoOf(ids) }, { axis: dim, batchDims: 0 })
  }

  reshape(x: Ref, shape: Shape): Ref {
    return this.#run('Reshape', { x: infoOf(x) }, { shape: [...shape] })
  }

  transpose(x: Ref, permutation: readonly number[]): Ref {
    return this.#run('Transpose', { x: infoOf(x) }, { perm: [...permutation] })
  }

  slice(x: Ref, begin: readonly number[], size: readonly number[]): Ref {
    return this.#run('Slice', { x: infoOf(x) }, { begin: [...begin], size: [...size] })
  }

  concat(xs: readonly Ref[], dim: number): Ref {
    if (xs.length === 1) return this.reshape(xs[0] as Ref, (xs[0] as Ref).shape)
    // An array, though the types of tfjs say that inputs have names.
    return this.#run('Concat', xs.map(infoOf) as unknown as NamedTensorInfoMap, { axis: dim })
  }

  pad(x: Ref, paddings: readonly (readonly [number, number])[]): Ref {
    return this.#run('PadV2', { x: infoOf(x) }, { paddings: paddings.map((pair) => [...pair]), constantValue: 0 })
  }

  tile(x: Ref, repeats: readonly number[]): Ref {
    return this.#run('Tile', { x: infoOf(x) }, { reps: [...repeats] })
  }

  conv2d(x: Ref, filter: Ref, stride: number): Ref {
    const attributes = { strides: stride, pad: 'valid', dataFormat: 'NHWC', dilations: [1, 1] }
    const result = this.#run('Conv2D', { x: infoOf(x), filter: infoOf(filter) }, attributes)
    this.#runtime.dropPacked(infoOf(filter))
    return result
  }

  #run(name: string, inputs: NamedTensorInfoMap, attrs: NamedAttrMap = {}): Ref {
    return this.#ref(this.#runtime.run(name, inputs, attrs))
  }

  #ref(info: TensorInfo): Ref {
    const ref: WasmRef = { dtype: requireDType(info.dtype), shape: info.shape, info }
    return this.made(ref)
  }
}

function infoOf(ref: Ref): TensorInfo {
  return (ref as WasmRef).info
}

function requireDType(dtype: DataType): 'float32' | 'int32' {
  return dtype as 'float32' | 'int32'
}

/** Rounds the bits of float32 to nearest, ties to even, and leaves zeros in the 16 that bfloat16 does not have. */
function roundWords(from: Uint32Array, to: Uint32Array): void {
  for (let i = 0; i < from.length; i++) {
    const bits = from[i] as number
    const isNumber = (bits & 0x7fffffff) <= 0x7f800000
    to[i] = isNumber ? (bits + 0x7fff + ((bits >>> 16) & 1)) & 0xffff0000 : 0x7fc00000
  }
}

/** The largest divisor that is at most the square root. */
function nearRoot(size: number): number {
  let divisor = Math.floor(Math.sqrt(size))
  while (size % divisor !== 0) divisor--
  return divisor
}
