import { castData, type DType, type Shape, type TensorData } from '@rankwise/core'
import type { ComputeDType } from '../device-dtype.ts'
import { type BinaryOp, Engine, type EngineDType, type ReduceOp, type Ref, type UnaryOp } from '../engine.ts'
import { type OpAttribute, type TensorMetadata, TF_BFLOAT16, TF_COMPLEX64, type TfjsBinding } from './binding.ts'

interface NativeRef extends Ref {
  readonly id: number
}

const BINARY: Readonly<Record<BinaryOp, string>> = {
  add: 'AddV2',
  sub: 'Sub',
  mul: 'Mul',
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

/** How a native engine computes. */
export interface NativeEngineOptions {
  readonly threads: number
  /**
   * What becomes of matrices that a file stores in bfloat16, to compute in float32: cast when they are loaded, or where they
   * are used, or never. `none`: as `cast`, and nothing is computed in bfloat16.
   */
  readonly bfloat16: 'none' | 'cast' | 'stored' | 'multiplied'
}

/** Runs TensorFlow's eager operations through the addon of tfjs-node. */
export class NativeEngine extends Engine {
  readonly name: 'native' | 'native-gpu'
  readonly threads: number
  readonly dtypes: readonly ComputeDType[]
  /** The scores of 768 tokens and 24 heads are 57 MB. */
  readonly maxScoreBytes: number = 2 ** 26
  readonly multipliesBfloat16: boolean
  /** Smaller pieces are slower, as the input is packed for each; larger ones are not faster. */
  readonly maxCastBytes: number = 2 ** 24
  readonly maxWeightBytes: number = Number.POSITIVE_INFINITY
  readonly #binding: TfjsBinding
  readonly #keepsBfloat16: boolean

  constructor(binding: TfjsBinding, { threads, bfloat16 }: NativeEngineOptions) {
    super()
    this.name = binding.isUsingGpuDevice() ? 'native-gpu' : 'native'
    this.threads = threads
    this.#binding = binding
    this.multipliesBfloat16 = bfloat16 === 'multiplied'
    this.#keepsBfloat16 = bfloat16 === 'stored' || bfloat16 === 'multiplied'
    this.dtypes = bfloat16 === 'none' ? ['float32'] : ['float32', 'bfloat16']
  }

  get liveTensors(): number {
    return this.#binding.getNumOfTensors()
  }

  /** Filters as TensorFlow takes them. */
  weightOrder({ length }: Shape): readonly number[] | undefined {
    return length === 4 ? [2, 3, 1, 0] : undefined
  }

  weightDType(stored: DType, { length }: Shape, computed: ComputeDType): 'float32' | 'bfloat16' {
    const isBfloat16 = computed === 'bfloat16' || (this.#keepsBfloat16 && stored === 'bfloat16')
    return isBfloat16 && length === 2 ? 'bfloat16' : 'float32'
  }

  write(dtype: EngineDType, shape: Shape, data: TensorData): Ref {
    if (dtype === 'bfloat16') return this.#writeBfloat16(shape, data as Uint16Array)
    const { TF_FLOAT, TF_INT32 } = this.#binding
    const elements = unshared(data as Float32Array | Int32Array)
    const id = this.#binding.createTensor([...shape], dtype === 'int32' ? TF_INT32 : TF_FLOAT, elements)
    return this.#ref({ id, shape: [...shape], dtype: dtype === 'int32' ? TF_INT32 : TF_FLOAT })
  }

  /** The addon takes no 16-bit floats: the bytes go over, and are then read as such where they lie. */
  #writeBfloat16(shape: Shape, data: Uint16Array): Ref {
    const { TF_UINT8 } = this.#binding
    const elements = unshared(data)
    const bytes = new Uint8Array(elements.buffer, elements.byteOffset, elements.byteLength)
    const id = this.#binding.createTensor([...shape, 2], TF_UINT8, bytes)
    try {
      return this.#execute('Bitcast', [id], [this.#type('T', TF_UINT8), this.#type('type', TF_BFLOAT16)])
    } finally {
      this.#binding.deleteTensor(id)
    }
  }

  read(ref: Ref): TensorData {
    if (ref.dtype !== 'bfloat16') return this.#binding.tensorDataSync(idOf(ref)) as TensorData
    const [float32] = this.tidy(() => [this.cast(ref, 'float32')])
    try {
      return castData(this.read(float32 as Ref), 'float32', 'bfloat16')
    } finally {
      this.free(float32 as Ref)
    }
  }

  free(ref: Ref): void {
    this.#binding.deleteTensor(idOf(ref))
  }

  binary(op: BinaryOp, a: Ref, b: Ref): Ref {
    return this.#run(BINARY[op], [a, b], [this.#typeOf('T', a)])
  }

  unary(op: UnaryOp, x: Ref): Ref {
    return this.#run(UNARY[op], [x], [this.#typeOf('T', x)])
  }

  reduce(op: ReduceOp, x: Ref): Ref {
    const { TF_ATTR_BOOL } = this.#binding
    const keepDims = { name: 'keep_dims', type: TF_ATTR_BOOL, value: true }
    return this.#withIntegers([[1]], (axis) => {
      return this.#run(REDUCE[op], [x, ...axis], [this.#typeOf('T', x), this.#integers('Tidx'), keepDims])
    })
  }

  softmax(x: Ref): Ref {
    return this.#run('Softmax', [x], [this.#typeOf('T', x)])
  }

  cast(x: Ref, dtype: 'float32' | 'bfloat16'): Ref {
    const target = dtype === 'float32' ? this.#binding.TF_FLOAT : TF_BFLOAT16
    return this.#run('Cast', [x], [this.#typeOf('SrcT', x), this.#type('DstT', target)])
  }

  roundToBfloat16(x: Ref): Ref {
    return this.tidy(() => [this.cast(this.cast(x, 'bfloat16'), 'float32')])[0] as Ref
  }

  matMul(a: Ref, b: Ref, transposeB: boolean): Ref {
    const { TF_ATTR_BOOL } = this.#binding
    return this.#run(
      'BatchMatMulV2',
      [a, b],
      [
        this.#typeOf('T', a),
        { name: 'adj_x', type: TF_ATTR_BOOL, value: false },
        { name: 'adj_y', type: TF_ATTR_BOOL, value: transposeB },
      ],
    )
  }

  /** A third of the time of eight operations on parts: nothing is split or joined. */
  override multiplyComplex(x: Ref, y: Ref): Ref {
    const { TF_FLOAT } = this.#binding
    const ids: number[] = []
    const run = (name: string, inputs: readonly number[], attributes: readonly OpAttribute[]) => {
      const [{ id }] = this.#binding.executeOp(name, attributes, inputs, 1) as [TensorMetadata]
      ids.push(id)
      return id
    }
    const toComplex = [this.#type('T', TF_FLOAT), this.#type('type', TF_COMPLEX64)]
    const fromComplex = [this.#type('T', TF_COMPLEX64), this.#type('type', TF_FLOAT)]
    try {
      const factors = [x, y].map((ref) => run('Bitcast', [idOf(ref)], toComplex))
      return this.#execute('Bitcast', [run('Mul', factors, [this.#type('T', TF_COMPLEX64)])], fromComplex)
    } finally {
      for (const id of ids) this.#binding.deleteTensor(id)
    }
  }

  gather(x: Ref, ids: Ref, dim: number): Ref {
    return this.#withIntegers([dim], (axis) => {
      const types = [this.#typeOf('Tparams', x), this.#integers('Tindices'), this.#integers('Taxis')]
      return this.#run('GatherV2', [x, ids, ...axis], types)
    })
  }

  reshape(x: Ref, shape: Shape): Ref {
    return this.#withIntegers([shape], (sizes) => {
      return this.#run('Reshape', [x, ...sizes], [this.#typeOf('T', x), this.#integers('Tshape')])
    })
  }

  transpose(x: Ref, permutation: readonly number[]): Ref {
    return this.#withIntegers([permutation], (perm) => {
      return this.#run('Transpose', [x, ...perm], [this.#typeOf('T', x), this.#integers('Tperm')])
    })
  }

  slice(x: Ref, begin: readonly number[], size: readonly number[]): Ref {
    return this.#withIntegers([begin, size], (bounds) => {
      return this.#run('Slice', [x, ...bounds], [this.#typeOf('T', x), this.#integers('Index')])
    })
  }

  concat(xs: readonly Ref[], dim: number): Ref {
    const [first] = xs as [Ref, ...Ref[]]
    if (xs.length === 1) return this.reshape(first, first.shape)
    const count = { name: 'N', type: this.#binding.TF_ATTR_INT, value: xs.length }
    return this.#withIntegers([dim], (axis) => {
      return this.#run('ConcatV2', [...xs, ...axis], [count, this.#typeOf('T', first), this.#integers('Tidx')])
    })
  }

  pad(x: Ref, paddings: readonly (readonly [number, number])[]): Ref {
    return this.#withIntegers([paddings.flat()], ([flat]) => {
      const pairs = this.reshape(flat as Ref, [paddings.length, 2])
      const padded = this.#run('Pad', [x, pairs], [this.#typeOf('T', x), this.#integers('Tpaddings')])
      return padded
    })
  }

  tile(x: Ref, repeats: readonly number[]): Ref {
    return this.#withIntegers([repeats], (multiples) => {
      return this.#run('Tile', [x, ...multiples], [this.#typeOf('T', x), this.#integers('Tmultiples')])
    })
  }

  conv2d(x: Ref, filter: Ref, stride: number): Ref {
    const { TF_ATTR_INT, TF_ATTR_STRING } = this.#binding
    return this.#run(
      'Conv2D',
      [x, filter],
      [
        this.#typeOf('T', x),
        { name: 'strides', type: TF_ATTR_INT, value: [1, stride, stride, 1] },
        { name: 'padding', type: TF_ATTR_STRING, value: 'VALID' },
        { name: 'data_format', type: TF_ATTR_STRING, value: 'NHWC' },
      ],
    )
  }

  /** Runs `body` with int32 tensors of lists, or of scalars, which are freed then. */
  #withIntegers(values: readonly (number | readonly number[])[], body: (refs: readonly Ref[]) => Ref): Ref {
    const [result] = this.tidy(() => {
      return [
        body(
          values.map((value) => {
            const list = typeof value === 'number' ? [value] : value
            return this.write('int32', typeof value === 'number' ? [] : [list.length], Int32Array.from(list))
          }),
        ),
      ]
    })
    return result as Ref
  }

  #run(name: string, inputs: readonly Ref[], attributes: readonly OpAttribute[]): Ref {
    return this.#execute(name, inputs.map(idOf), attributes)
  }

  #execute(name: string, inputs: readonly number[], attributes: readonly OpAttribute[]): Ref {
    return this.#ref(this.#binding.executeOp(name, attributes, inputs, 1)[0] as TensorMetadata)
  }

  #ref({ id, shape, dtype }: TensorMetadata): Ref {
    const ref: NativeRef = { id, shape, dtype: this.#dtypeOf(dtype) }
    return this.made(ref)
  }

  #dtypeOf(type: number): EngineDType {
    if (type === TF_BFLOAT16) return 'bfloat16'
    return type === this.#binding.TF_INT32 ? 'int32' : 'float32'
  }

  #typeOf(name: string, { dtype }: Ref): OpAttribute {
    const { TF_FLOAT, TF_INT32 } = this.#binding
    return this.#type(name, { float32: TF_FLOAT, int32: TF_INT32, bfloat16: TF_BFLOAT16 }[dtype])
  }

  #integers(name: string): OpAttribute {
    return this.#type(name, this.#binding.TF_INT32)
  }

  #type(name: string, value: number): OpAttribute {
    return { name, type: this.#binding.TF_ATTR_TYPE, value }
  }
}

function idOf(ref: Ref): number {
  return (ref as NativeRef).id
}

/** The addon does not take arrays on shared memory. */
function unshared<T extends Float32Array | Int32Array | Uint16Array>(data: T): T {
  return data.buffer instanceof SharedArrayBuffer ? (data.slice() as T) : data
}
