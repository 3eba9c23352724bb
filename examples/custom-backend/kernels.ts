// Every operation as plain loops. A kernel gets host tensors and the types of its results, and returns their elements.
import { allocate, sizeOf, type Tensor, type TensorData, type TensorType } from '@rankwise/core'

type Numbers = Float32Array
/** Computes one operation from its operands, its attributes, and the types of its results. */
export type Kernel = (
  inputs: readonly Tensor[],
  attributes: never,
  outputs: readonly TensorType[],
) => readonly TensorData[]

/** The float32 elements of an operand. */
const numbers = (tensor: Tensor | undefined) => tensor?.data as Numbers
const at = (data: ArrayLike<number>, index: number) => data[index] as number
const dims = (tensor: TensorType | undefined) => tensor?.shape as [number, number, number, number]

/** One element of the result for every element of the first operand. */
const map =
  (f: (x: number, value: number) => number): Kernel =>
  ([x], { value }: { value: number }) => [numbers(x).map((element) => f(element, value))]

const strides = (shape: readonly number[]) => shape.map((_, dim) => sizeOf(shape.slice(dim + 1)))

/** Calls `visit` with the index of every element, in row-major order. */
function forEach(shape: readonly number[], visit: (index: readonly number[], flat: number) => void): void {
  const index = shape.map(() => 0)
  for (let flat = 0; flat < sizeOf(shape); flat++) {
    visit(index, flat)
    for (let dim = shape.length - 1; dim >= 0 && ++(index as [number])[dim as 0] === shape[dim]; dim--) index[dim] = 0
  }
}

/** Elements of x wherever `source` says, for every element of a result; 0 where it says -1. */
function pick(x: Tensor, { dtype, shape }: TensorType, source: (index: readonly number[]) => number): TensorData {
  const result = allocate(dtype, sizeOf(shape))
  forEach(shape, (index, flat) => {
    result[flat] = (x.data[source(index)] ?? 0) as number
  })
  return result
}

const offset = (index: readonly number[], steps: readonly number[]) =>
  index.reduce((sum, i, dim) => sum + i * at(steps, dim), 0)

/** NumPy broadcasting: shapes are aligned from the right, and a dimension of size 1 is repeated. */
const broadcast =
  (f: (a: number, b: number) => number): Kernel =>
  (inputs, _attributes, [output]) => {
    const { shape } = output as TensorType
    const [a, b] = inputs.map((input) => {
      const padded = [...new Array<number>(shape.length - input.shape.length).fill(1), ...input.shape]
      const steps = strides(padded).map((step, dim) => (padded[dim] === 1 ? 0 : step))
      return pick(input, output as TensorType, (index) => offset(index, steps)) as Numbers
    })
    return [(a as Numbers).map((element, i) => f(element, at(b as Numbers, i)))]
  }

/** Index ranges of x along a dimension, one after the other. */
function ranges(x: Tensor, output: TensorType, dim: number, starts: readonly number[], ends: readonly number[]) {
  const places = starts.flatMap((start, i) => Array.from({ length: at(ends, i) - start }, (_, j) => start + j))
  const steps = strides(x.shape)
  return pick(x, output, (index) => offset(index.with(dim, at(places, index[dim] as number)), steps))
}

function dot(a: Numbers, startA: number, b: Numbers, startB: number, length: number): number {
  let sum = 0
  for (let i = 0; i < length; i++) sum += at(a, startA + i) * at(b, startB + i)
  return sum
}

/** Rows of `width` elements to `(x - mean) / sqrt(variance + eps)`, or without the mean to `x / sqrt(mean(x²) + eps)`. */
function normalize(x: Numbers, width: number, eps: number, centered: boolean): Numbers {
  const result = new Float32Array(x.length)
  for (let start = 0; start < x.length; start += width) {
    const row = Float64Array.from(x.subarray(start, start + width))
    const mean = centered ? row.reduce((sum, value) => sum + value, 0) / width : 0
    const square = row.reduce((sum, value) => sum + (value - mean) ** 2, 0) / width
    result.set(
      row.map((value) => (value - mean) / Math.sqrt(square + eps)),
      start,
    )
  }
  return result
}

const norm =
  (centered: boolean): Kernel =>
  ([x, weight, bias], { eps }: { eps: number }) => {
    const width = x?.shape.at(-1) as number
    const scaled = normalize(numbers(x), width, eps, centered)
    const element = (operand: Tensor | undefined, i: number, absent: number) =>
      operand === undefined ? absent : at(numbers(operand), i % width)
    return [scaled.map((value, i) => value * element(weight, i, 1) + element(bias, i, 0))]
  }

const groupNorm: Kernel = ([x, weight, bias], { groups, eps }: { groups: number; eps: number }) => {
  const [, channels, height, width] = dims(x)
  const scaled = normalize(numbers(x), (channels / groups) * height * width, eps, true)
  const channel = (i: number) => Math.floor(i / (height * width)) % channels
  return [scaled.map((value, i) => value * at(numbers(weight), channel(i)) + at(numbers(bias), channel(i)))]
}

/** `x @ weight.T`, as torch stores weights. */
const linear: Kernel = ([x, weight]) => {
  const [out, width] = dims(weight)
  const rows = sizeOf(x?.shape.slice(0, -1) ?? [])
  const result = new Float32Array(rows * out)
  for (let i = 0; i < result.length; i++) {
    result[i] = dot(numbers(x), Math.floor(i / out) * width, numbers(weight), (i % out) * width, width)
  }
  return [result]
}

/** A rank that has some columns of the table puts zeros `before` and after them. */
const embedding: Kernel = ([ids, table], { before = 0 }: { before?: number }, [output]) => {
  const [entries, width] = dims(table)
  const unknown = ids?.data.find((id: number | bigint) => id < 0 || id >= entries)
  if (unknown !== undefined) throw new RangeError(`the id ${unknown} is outside of a table of ${entries} rows`)
  return [
    pick(table as Tensor, output as TensorType, (index) => {
      const row = offset(index.slice(0, -1), strides(ids?.shape ?? []))
      const column = (index.at(-1) as number) - before
      return column < 0 || column >= width ? -1 : Number(ids?.data[row]) * width + column
    }),
  ]
}

/** In place; all zeros where every score is -Infinity. */
function softmax(scores: Float64Array): void {
  const largest = scores.reduce((max, score) => Math.max(max, score), Number.NEGATIVE_INFINITY)
  const total = scores.reduce((sum, score) => sum + Math.exp(score - largest), 0)
  for (const [i, score] of scores.entries()) {
    scores[i] = largest === Number.NEGATIVE_INFINITY ? 0 : Math.exp(score - largest) / total
  }
}

const attention: Kernel = (inputs, { scale, causal }: { scale: number; causal: boolean }, [output]) => {
  const [q, k, v, bias] = inputs as [Tensor, Tensor, Tensor, Tensor | undefined]
  const [batch, queries, heads, width] = dims(q)
  const [, keys, kvHeads, valueWidth] = dims(v)
  const result = new Float32Array(sizeOf((output as TensorType).shape))
  forEach([batch, queries, heads], (index, flat) => {
    const [b, i, h] = index as [number, number, number]
    const rowOfKey = (j: number) => (b * keys + j) * kvHeads + Math.floor((h * kvHeads) / heads)
    const biasStart = bias === undefined ? 0 : ((b % dims(bias)[0]) * queries + i) * keys
    const scores = Float64Array.from({ length: keys }, (_, j) => {
      if (causal && j > i) return Number.NEGATIVE_INFINITY
      const score = scale * dot(numbers(q), flat * width, numbers(k), rowOfKey(j) * width, width)
      return score + (bias === undefined ? 0 : at(numbers(bias), biasStart + j))
    })
    softmax(scores)
    for (const [j, probability] of scores.entries()) {
      const row = rowOfKey(j) * valueWidth
      for (let d = 0; d < valueWidth; d++) {
        result[flat * valueWidth + d] = at(result, flat * valueWidth + d) + probability * at(numbers(v), row + d)
      }
    }
  })
  return [result]
}

const rope: Kernel = ([x, cos, sin], { interleaved }: { interleaved: boolean }) => {
  const [, tokens, heads, width] = dims(x)
  const half = width / 2
  const [data, result] = [numbers(x), new Float32Array(numbers(x).length)]
  for (let pair = 0; pair < data.length / 2; pair++) {
    const [row, i] = [Math.floor(pair / half), pair % half]
    const first = row * width + (interleaved ? 2 * i : i)
    const second = first + (interleaved ? 1 : half)
    const angle = (Math.floor(row / heads) % tokens) * half + i
    const [c, s] = [at(numbers(cos), angle), at(numbers(sin), angle)]
    result[first] = at(data, first) * c - at(data, second) * s
    result[second] = at(data, second) * c + at(data, first) * s
  }
  return [result]
}

const conv2d: Kernel = ([x, weight, bias], { stride, padding }: { stride: number; padding: number[] }, [output]) => {
  const [, channels, height, width] = dims(x)
  const [, , kernelHeight, kernelWidth] = dims(weight)
  const result = new Float32Array(sizeOf((output as TensorType).shape))
  forEach((output as TensorType).shape, (index, flat) => {
    const [b, o, row, column] = index as [number, number, number, number]
    let sum = at(numbers(bias), o)
    forEach([channels, kernelHeight, kernelWidth], (place, tap) => {
      const [c, dy, dx] = place as [number, number, number]
      const [y, left] = [row * stride + dy - at(padding, 0), column * stride + dx - at(padding, 2)]
      if (y < 0 || y >= height || left < 0 || left >= width) return
      const pixel = at(numbers(x), ((b * channels + c) * height + y) * width + left)
      sum += pixel * at(numbers(weight), o * channels * kernelHeight * kernelWidth + tap)
    })
    result[flat] = sum
  })
  return [result]
}

/** Kernels by the name of their operation. */
export const KERNELS: ReadonlyMap<string, Kernel> = new Map<string, Kernel>([
  ['add', broadcast((a, b) => a + b)],
  ['sub', broadcast((a, b) => a - b)],
  ['mul', broadcast((a, b) => a * b)],
  ['div', broadcast((a, b) => a / b)],
  ['add_scalar', map((x, value) => x + value)],
  ['mul_scalar', map((x, value) => x * value)],
  ['silu', map((x) => x / (1 + Math.exp(-x)))],
  ['sin', map(Math.sin)],
  ['cos', map(Math.cos)],
  ['linear', linear],
  ['embedding', embedding],
  ['reshape', ([x]) => [(x as Tensor).data.slice()]],
  [
    'transpose',
    ([x], { permutation }: { permutation: number[] }, [output]) => {
      const steps = strides((x as Tensor).shape)
      const moved = permutation.map((dim) => at(steps, dim))
      return [pick(x as Tensor, output as TensorType, (index) => offset(index, moved))]
    },
  ],
  [
    'split',
    ([x], { dim, sizes }: { dim: number; sizes: number[] }, outputs) => {
      const end = (i: number) => sizes.slice(0, i + 1).reduce((sum, size) => sum + size, 0)
      return outputs.map((output, i) => ranges(x as Tensor, output, dim, [end(i) - at(sizes, i)], [end(i)]))
    },
  ],
  [
    'concat',
    (inputs, { dim }: { dim: number }, [output]) => {
      const { dtype, shape } = output as TensorType
      const result = allocate(dtype, sizeOf(shape))
      let start = 0
      for (const input of inputs) {
        const steps = strides(shape)
        forEach(input.shape, (index, flat) => {
          result[offset(index, steps) + start * at(steps, dim)] = input.data[flat] as number
        })
        start += input.shape[dim] as number
      }
      return [result]
    },
  ],
  [
    'shard',
    ([x], { dim, starts, ends }: { dim: number; starts: number[]; ends: number[] }, [output]) => [
      ranges(x as Tensor, output as TensorType, dim, starts, ends),
    ],
  ],
  ['layer_norm', norm(true)],
  ['rms_norm', norm(false)],
  ['group_norm', groupNorm],
  ['attention', attention],
  ['rope', rope],
  ['conv2d', conv2d],
  [
    'upsample_nearest2d',
    ([x], { scale }: { scale: number }, [output]) => {
      const steps = strides((x as Tensor).shape)
      return [
        pick(x as Tensor, output as TensorType, (index) =>
          offset(
            index.map((i, dim) => (dim < 2 ? i : Math.floor(i / scale))),
            steps,
          ),
        ),
      ]
    },
  ],
])
