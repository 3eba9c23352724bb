import { randomBytes } from 'node:crypto'
import {
  allocate,
  castData,
  type DType,
  type DTypeArrays,
  RankwiseError,
  type Shape,
  sizeOf,
  Tensor,
  textOf,
} from '@rankwise/core'
import { boxMuller16, boxMuller16Float64 } from './box-muller.ts'
import { MersenneTwister } from './mersenne-twister.ts'

/** dtypes that `randn` draws. */
export type RandnDType = 'float32' | 'bfloat16' | 'float16' | 'float64'

/** The seed of a `torch.Generator` that nobody has seeded: `c10::detail::default_rng_seed_val`. */
const DEFAULT_SEED = 67280421310721n

/** From this size on torch draws normals in blocks of 16; below it one pair at a time, in float64. */
const BLOCK = 16

/**
 * The random numbers of `torch.Generator` on the CPU (MT19937), so that a seed gives the same noise here and there.
 *
 * Compared with torch 2.13 on an x86-64 CPU with AVX2:
 * - `randn` in float32, bfloat16 and float16: bit-exact (every golden; 16 million consecutive float32 samples; and the
 *   block transform for each of the 2^24 uniforms that can enter it).
 * - `rand`: bit-exact.
 * - `randn` in float64: within 3 units in the last place (94 % bit-exact), since the C library's `log`, `sin` and `cos`
 *   differ from JavaScript's there.
 *
 * torch itself differs in the last bits between CPU architectures: without AVX2 its own float32 noise is not this one.
 */
export class Generator {
  #initialSeed = DEFAULT_SEED
  #engine = engineOf(DEFAULT_SEED)
  /** The second normal of a pair drawn for fewer than 16 values. It waits for the next such draw, as torch's does. */
  #spare: number | undefined

  /**
   * Starts the sequence of a seed.
   *
   * @param seed an integer of -2^63 … 2^64 - 1, negative ones by their two's complement; beyond 2^53 as a `bigint`.
   *   Seeds that agree modulo 2^32 give the same numbers.
   * @throws RankwiseError `GENERATOR_SEED`
   */
  manualSeed(seed: number | bigint): this {
    this.#initialSeed = toUint64(seed)
    this.#engine = engineOf(this.#initialSeed)
    this.#spare = undefined
    return this
  }

  /** The seed last set, as the unsigned 64-bit integer that torch reports. */
  initialSeed(): bigint {
    return this.#initialSeed
  }

  /** Seeds from the operating system's entropy, with 53 bits as torch does, and returns the seed. */
  seed(): bigint {
    const seed = randomBytes(8).readBigUInt64LE() & 0x1fffffffffffffn
    this.manualSeed(seed)
    return seed
  }

  /** A generator that goes on as this one would, independently of it, as torch's `clone_state`. */
  cloneState(): Generator {
    const clone = new Generator()
    clone.#initialSeed = this.#initialSeed
    clone.#engine = this.#engine.clone()
    clone.#spare = this.#spare
    return clone
  }

  /**
   * Standard normal samples, as `torch.randn(shape, generator=g, dtype=dtype)` draws them.
   *
   * @throws RankwiseError `GENERATOR_SHAPE`, `GENERATOR_DTYPE`
   */
  randn<D extends RandnDType = 'float32'>(shape: Shape, { dtype }: { dtype?: D } = {}): Tensor<D> {
    const type = dtype ?? ('float32' as D)
    const size = checkedSize(shape)
    return new Tensor(type, shape, this.#normals(size, type))
  }

  /**
   * Uniform samples of [0, 1), as `torch.rand(shape, generator=g, dtype=dtype)` draws them.
   *
   * @throws RankwiseError `GENERATOR_SHAPE`, `GENERATOR_DTYPE`
   */
  rand<D extends 'float32' | 'float64' = 'float32'>(shape: Shape, { dtype }: { dtype?: D } = {}): Tensor<D> {
    const type: DType = dtype ?? 'float32'
    if (type !== 'float32' && type !== 'float64') throw unsupportedDType('rand', type, ['float32', 'float64'])
    const data = allocate(type, checkedSize(shape))
    const draw = type === 'float32' ? () => this.#uniform24() : () => this.#uniform53()
    for (let i = 0; i < data.length; i++) data[i] = draw()
    return new Tensor(type as D, shape, data as DTypeArrays[D])
  }

  #normals<D extends RandnDType>(size: number, dtype: D): DTypeArrays[D] {
    switch (dtype as RandnDType) {
      case 'float64':
        return castData(size < BLOCK ? this.#pairs(size) : this.#blocksFloat64(size), 'float64', dtype)
      case 'float32':
      case 'float16':
      case 'bfloat16':
        if (size < BLOCK) return castData(this.#pairs(size), 'float64', dtype)
        return castData(this.#blocks(size, dtype === 'float32'), 'float32', dtype)
      default:
        throw unsupportedDType('randn', dtype, ['float32', 'bfloat16', 'float16', 'float64'])
    }
  }

  /** Fewer than 16 values: Box-Muller pair by pair in float64, cosine first. */
  #pairs(size: number): Float64Array {
    const data = new Float64Array(size)
    for (let i = 0; i < size; i++) data[i] = this.#nextNormal()
    return data
  }

  #nextNormal(): number {
    const spare = this.#spare
    if (spare !== undefined) {
      this.#spare = undefined
      return spare
    }
    const angle = 2 * Math.PI * this.#uniform53()
    const radius = Math.sqrt(-2 * Math.log1p(-this.#uniform53()))
    this.#spare = radius * Math.sin(angle)
    return radius * Math.cos(angle)
  }

  /**
   * Whole blocks of 16; where `size` is no multiple of 16 the last 16 values are a further block, drawn anew. For
   * float32 torch has drawn a uniform for every value before it does that, for the 16-bit floats only those of whole
   * blocks: the tails differ.
   */
  #blocks(size: number, drawsAll: boolean): Float32Array {
    const data = new Float32Array(size)
    const whole = size - (size % BLOCK)
    for (let i = 0; i < (drawsAll ? size : whole); i++) data[i] = this.#uniform24()
    for (let i = 0; i < whole; i += BLOCK) boxMuller16(data, i)
    if (whole < size) {
      for (let i = size - BLOCK; i < size; i++) data[i] = this.#uniform24()
      boxMuller16(data, size - BLOCK)
    }
    return data
  }

  #blocksFloat64(size: number): Float64Array {
    const data = new Float64Array(size)
    const whole = size - (size % BLOCK)
    for (let i = 0; i < size; i++) data[i] = this.#uniform53()
    for (let i = 0; i < whole; i += BLOCK) boxMuller16Float64(data, i)
    if (whole < size) {
      for (let i = size - BLOCK; i < size; i++) data[i] = this.#uniform53()
      boxMuller16Float64(data, size - BLOCK)
    }
    return data
  }

  #uniform24(): number {
    return (this.#engine.nextUint32() & 0xffffff) / 2 ** 24
  }

  #uniform53(): number {
    const high = this.#engine.nextUint32() & 0x1fffff
    return (high * 2 ** 32 + this.#engine.nextUint32()) / 2 ** 53
  }
}

/**
 * Standard normal samples for a batch, as diffusers' `randn_tensor`: one generator draws the whole shape; with several,
 * number i draws sample i of the batch, so that its image does not depend on the others.
 *
 * @param shape `[batch, ...]`
 * @param generator one generator, or one for each sample of the batch; a list of one counts as that one
 * @throws RankwiseError `GENERATOR_BATCH`, `GENERATOR_SHAPE`, `GENERATOR_DTYPE`
 */
export function randnTensor<D extends RandnDType = 'float32'>(
  shape: Shape,
  generator: Generator | readonly Generator[],
  options: { dtype?: D } = {},
): Tensor<D> {
  const generators = generator instanceof Generator ? [generator] : generator
  const [first] = generators
  if (first !== undefined && generators.length === 1) return first.randn(shape, options)
  if (first === undefined || generators.length !== shape[0]) {
    throw new RankwiseError('GENERATOR_BATCH', 'the number of generators does not fit the batch', {
      actual: { generators: generators.length, batch: shape[0], shape },
      rule: 'one generator, or one for each sample of the batch',
    })
  }
  const samples = generators.map((each) => each.randn([1, ...shape.slice(1)], options))
  const dtype = options.dtype ?? ('float32' as D)
  const data = allocate(dtype, checkedSize(shape)) as DTypeArrays[RandnDType]
  samples.forEach((sample, i) => {
    data.set(sample.data as DTypeArrays[RandnDType], i * sample.data.length)
  })
  return new Tensor(dtype, shape, data as DTypeArrays[D])
}

function engineOf(seed: bigint): MersenneTwister {
  return new MersenneTwister(Number(BigInt.asUintN(32, seed)))
}

function toUint64(seed: number | bigint): bigint {
  if (typeof seed === 'number' && !Number.isSafeInteger(seed)) {
    throw new RankwiseError('GENERATOR_SEED', 'the seed is not an exact integer', {
      actual: { seed },
      rule: 'a number seed is an integer of at most 53 bits',
      remedy: 'pass larger seeds as a bigint: 18446744073709551615n',
    })
  }
  const integer = BigInt(seed)
  if (integer < -(2n ** 63n) || integer >= 2n ** 64n) {
    throw new RankwiseError('GENERATOR_SEED', 'the seed does not fit 64 bits', {
      actual: { seed: integer },
      rule: '-2^63 <= seed < 2^64',
    })
  }
  return BigInt.asUintN(64, integer)
}

function checkedSize(shape: Shape): number {
  if (!shape.every((size) => Number.isSafeInteger(size) && size >= 0)) {
    throw new RankwiseError('GENERATOR_SHAPE', 'the shape is not a list of sizes', {
      actual: { shape },
      rule: 'every size is an integer >= 0',
    })
  }
  return sizeOf(shape)
}

function unsupportedDType(method: string, dtype: DType, supported: readonly DType[]): RankwiseError {
  return new RankwiseError('GENERATOR_DTYPE', `${method} does not draw ${textOf(dtype)}`, {
    actual: { dtype },
    rule: `dtype is one of ${supported.join(', ')}`,
    remedy: 'draw float32 and cast',
  })
}
