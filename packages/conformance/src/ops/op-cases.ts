import { type Attributes, DTYPES, isFloatingPoint, type Shape, sizeOf, Tensor } from '@rankwise/core'
import type { OpCase } from './op-case.ts'
import { between, normal, rotation } from './random.ts'

function shapesOf(inputs: readonly Tensor[]): string {
  return inputs.map(({ shape }) => `[${shape.join(', ')}]`).join(' ')
}

function opCase(op: string, inputs: readonly Tensor[], attributes: Attributes = {}, note = ''): OpCase {
  return { op, title: `${op} ${shapesOf(inputs)} ${note}`.trim(), inputs, attributes }
}

function withAttributes(op: string, inputs: readonly Tensor[], attributes: Attributes = {}): OpCase {
  return opCase(op, inputs, attributes, JSON.stringify(attributes))
}

function ints(shape: Shape): Tensor {
  return Tensor.int32(
    shape,
    Int32Array.from({ length: sizeOf(shape) }, (_, i) => i),
  )
}

const PAIRS: readonly (readonly [Shape, Shape])[] = [
  [[3], [3]],
  [[], [2, 3]],
  [
    [2, 5, 7],
    [1, 1, 7],
  ],
  [
    [2, 1, 7],
    [5, 1],
  ],
  [
    [1, 33, 1],
    [4, 1, 3],
  ],
  [
    [0, 3],
    [1, 3],
  ],
]

const elementwise = [
  ...['add', 'sub', 'mul'].flatMap((op) => PAIRS.map(([a, b]) => opCase(op, [normal(a, 1), normal(b, 2)]))),
  ...PAIRS.map(([a, b]) => opCase('div', [normal(a, 1), between(0.5, 2, b, 2)])),
  ...[[], [1], [2, 3, 5], [4, 0], [9, 1001]].flatMap((shape) => [
    opCase('mul_scalar', [normal(shape, 3)], { value: -0.1 }),
    opCase('add_scalar', [normal(shape, 4)], { value: 1.5 }),
    opCase('silu', [normal(shape, 5, { deviation: 3 })]),
    opCase('sin', [between(-8, 8, shape, 6)]),
    opCase('cos', [between(-8, 8, shape, 6)]),
  ]),
  opCase('silu', [normal([4096], 7, { deviation: 30 })], {}, 'far from 0'),
  opCase('sin', [between(0, 1000 * 2 * Math.PI, [10_000], 8)], {}, 'of 1000 turns'),
  opCase('cos', [between(0, 1000 * 2 * Math.PI, [10_000], 9)], {}, 'of 1000 turns'),
]

/** Values that rounding to 16 bits is easily wrong for, as the bits of float32. */
const ROUNDING_BITS: readonly number[] = [
  // Ties between neighbours of bfloat16, up to the even one and down to it; then one above and below a tie.
  0x3f808000, 0x3f818000, 0xbf808000, 0xbf818000, 0x3f808001, 0x3f807fff, 0x3f818001, 0x3f817fff,
  // A carry into the exponent, and beyond the largest number to infinity.
  0x3fffffff, 0x7f7f7fff, 0x7f7f8000, 0x7f7fffff, 0xff7fffff,
  // Zeros, subnormals of float32 and of bfloat16, and the smallest normal number.
  0x00000000, 0x80000000, 0x00000001, 0x00008000, 0x00008001, 0x00018000, 0x80018000, 0x007fffff, 0x00800000,
  // Infinities and NaN: with all its bits in the half that is cut off, with all bits set, and with a sign.
  0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001, 0x7fffffff, 0xff800001,
]

const roundings = Tensor.float32([28], new Float32Array(Uint32Array.from(ROUNDING_BITS).buffer))

const casts = DTYPES.filter(isFloatingPoint).flatMap((dtype) => [
  opCase('cast', [roundings], { dtype }, `of what is easily rounded wrong to ${dtype}`),
  opCase('cast', [normal([3, 33], 18, { deviation: 100 })], { dtype }, `to ${dtype}`),
  opCase('cast', [normal([], 19)], { dtype }, `to ${dtype}`),
  opCase('cast', [normal([2, 0], 19)], { dtype }, `to ${dtype}`),
])

const linear = [
  ...(
    [
      [[4], [3, 4]],
      [
        [1, 1],
        [1, 1],
      ],
      [
        [2, 7, 16],
        [16, 16],
      ],
      [
        [3, 5, 2, 33],
        [9, 33],
      ],
      [
        [1, 300, 257],
        [129, 257],
      ],
      [
        [2, 0],
        [3, 0],
      ],
      [
        [0, 4],
        [3, 4],
      ],
      [
        [2, 4],
        [0, 4],
      ],
    ] as const
  ).map(([x, weight]) => opCase('linear', [normal(x, 10), normal(weight, 11)])),
  withAttributes('embedding', [Tensor.int32([2, 3], [4, 0, 2, 2, 1, 3]), normal([5, 7], 12)]),
  withAttributes('embedding', [Tensor.int32([], [1]), normal([2, 1], 13)]),
  withAttributes('embedding', [Tensor.int32([0], []), normal([5, 7], 14)]),
  withAttributes('embedding', [Tensor.int32([1, 4], [0, 1, 2, 3]), normal([4, 0], 15)]),
  withAttributes('embedding', [Tensor.int32([2, 3], [4, 0, 2, 2, 1, 3]), normal([5, 7], 12)], { before: 7, after: 14 }),
  withAttributes('embedding', [Tensor.int32([3], [1, 0, 1]), normal([2, 5], 16)], { before: 5, after: 0 }),
  withAttributes('embedding', [Tensor.int32([2, 1], [1, 0]), normal([2, 5], 17)], { before: 0, after: 5 }),
]

const movement = [
  withAttributes('reshape', [normal([2, 6], 20)], { shape: [3, 2, 2] }),
  withAttributes('reshape', [normal([1], 21)], { shape: [] }),
  withAttributes('reshape', [normal([2, 3], 21)], { shape: [2, 3] }),
  withAttributes('reshape', [normal([0, 3], 22)], { shape: [5, 0] }),
  withAttributes('reshape', [ints([4, 3])], { shape: [12] }),
  withAttributes('transpose', [normal([2, 3, 5], 23)], { permutation: [2, 0, 1] }),
  withAttributes('transpose', [normal([3, 3, 3], 23)], { permutation: [2, 0, 1] }),
  withAttributes('transpose', [normal([7], 24)], { permutation: [0] }),
  withAttributes('transpose', [ints([3, 1, 2, 2])], { permutation: [3, 1, 0, 2] }),
  withAttributes('transpose', [normal([2, 0], 25)], { permutation: [1, 0] }),
  withAttributes('split', [normal([2, 7], 26)], { dim: 1, sizes: [3, 3, 1] }),
  withAttributes('split', [normal([2, 6], 26)], { dim: 1, sizes: [3, 3] }),
  withAttributes('split', [normal([5, 2], 27)], { dim: 0, sizes: [5] }),
  withAttributes('split', [normal([2, 3, 2], 28)], { dim: 1, sizes: [0, 3, 0] }),
  withAttributes('split', [normal([0, 4], 29)], { dim: 1, sizes: [1, 3] }),
  withAttributes('split', [ints([4, 3])], { dim: 0, sizes: [1, 3] }),
  withAttributes('concat', [normal([2, 3], 30), normal([2, 1], 31), normal([2, 3], 32)], { dim: 1 }),
  withAttributes('concat', [normal([2, 3], 33)], { dim: 0 }),
  withAttributes('concat', [normal([0, 3], 34), normal([2, 3], 35), normal([0, 3], 36)], { dim: 0 }),
  withAttributes('concat', [normal([0, 3], 37), normal([0, 3], 38)], { dim: 0 }),
  withAttributes('concat', [ints([1, 2]), ints([3, 2])], { dim: 0 }),
]

const NORM_SHAPES: readonly Shape[] = [[1], [5], [3, 1], [2, 3, 33], [2, 4, 3, 16], [7, 6144], [2, 0, 4]]

const norm = [
  ...NORM_SHAPES.flatMap((shape) => {
    const width = [shape.at(-1) as number]
    const [x, weight, bias] = [normal(shape, 40, { mean: 1 }), normal(width, 41), normal(width, 42)]
    return [
      opCase('layer_norm', [x], { eps: 1e-6 }),
      opCase('layer_norm', [x, weight], { eps: 1e-5 }),
      opCase('layer_norm', [x, weight, bias], { eps: 1e-6 }),
      opCase('rms_norm', [x], { eps: 1e-6 }),
      opCase('rms_norm', [x, weight], { eps: 1e-5 }),
    ]
  }),
  opCase('layer_norm', [normal([9, 128], 43, { mean: 30 })], { eps: 1e-6 }, 'mean of 30 deviations'),
  opCase('layer_norm', [normal([9, 128], 44, { deviation: 1e-3 })], { eps: 1e-5 }, 'near eps'),
  opCase('rms_norm', [normal([9, 128], 45, { deviation: 1e-3 })], { eps: 1e-5 }, 'near eps'),
  opCase('layer_norm', [normal([0, 3], 46)], { eps: 1e-6 }),
  opCase('rms_norm', [normal([3, 0], 47)], { eps: 1e-6 }),
  ...(
    [
      [[1, 1, 1, 1], 1],
      [[2, 6, 3, 5], 3],
      [[1, 4, 1, 7], 4],
      [[1, 8, 64, 65], 2],
      [[0, 4, 2, 2], 2],
      [[2, 4, 0, 2], 2],
    ] as const
  ).flatMap(([shape, groups]) => {
    const channels = [shape[1]]
    // A group of equal values would have no direction: its result is rounding noise in float32.
    const x = normal(shape, 48, { mean: 2 })
    return [opCase('group_norm', [x, normal(channels, 49), normal(channels, 50)], { groups, eps: 1e-2 })]
  }),
  opCase('group_norm', [normal([1, 2, 512, 512], 51, { mean: 3 }), normal([2], 52), normal([2], 53)], {
    groups: 1,
    eps: 1e-6,
  }),
]

interface AttentionSizes {
  readonly batch?: number
  readonly queries: number
  readonly keys?: number
  readonly heads: number
  readonly kvHeads?: number
  readonly headDim: number
  readonly valueDim?: number
  readonly causal?: boolean
  readonly scale?: number
  readonly bias?: Tensor
}

function attention(sizes: AttentionSizes): OpCase {
  const { batch = 1, queries, heads, headDim, causal = false, bias } = sizes
  const { keys = queries, kvHeads = heads, valueDim = headDim, scale = headDim ** -0.5 } = sizes
  const qkv = [
    normal([batch, queries, heads, headDim], 60),
    normal([batch, keys, kvHeads, headDim], 61),
    normal([batch, keys, kvHeads, valueDim], 62),
  ]
  const note = `${causal ? 'causal' : ''} scale ${scale}`
  return opCase('attention', bias === undefined ? qkv : [...qkv, bias], { scale, causal }, note)
}

/** Random numbers where `isSeen`, -Infinity elsewhere. */
function mask(shape: Shape, isSeen: (query: number, key: number, batch: number) => boolean): Tensor {
  const [, , queries, keys] = shape as [number, number, number, number]
  const bias = normal(shape, 63)
  for (let i = 0; i < bias.data.length; i++) {
    const seen = isSeen(Math.floor(i / keys) % queries, i % keys, Math.floor(i / keys / queries))
    if (!seen) bias.data[i] = Number.NEGATIVE_INFINITY
  }
  return bias
}

const attentions = [
  attention({ queries: 1, heads: 1, headDim: 1 }),
  attention({ queries: 33, heads: 4, headDim: 16 }),
  attention({ batch: 2, queries: 7, keys: 13, heads: 3, headDim: 5 }),
  attention({ batch: 2, queries: 9, heads: 2, headDim: 8, valueDim: 3, scale: 0.7 }),
  attention({ queries: 300, heads: 2, headDim: 128 }),
  attention({ queries: 17, heads: 4, headDim: 8, causal: true }),
  attention({ queries: 5, keys: 9, heads: 2, headDim: 8, causal: true }),
  attention({ queries: 9, keys: 5, heads: 2, headDim: 8, causal: true }),
  attention({ batch: 2, queries: 11, heads: 6, kvHeads: 2, headDim: 8 }),
  attention({ batch: 2, queries: 11, heads: 6, kvHeads: 2, headDim: 8, causal: true }),
  attention({ queries: 6, heads: 4, kvHeads: 1, headDim: 4, valueDim: 2 }),
  attention({ batch: 2, queries: 7, keys: 9, heads: 2, headDim: 8, bias: mask([2, 1, 7, 9], (_, key) => key < 7) }),
  attention({ batch: 2, queries: 7, heads: 4, kvHeads: 2, headDim: 8, bias: mask([1, 1, 7, 7], (i, j) => j <= i + 2) }),
  // Query 0 of the second batch entry sees nothing.
  attention({ batch: 2, queries: 3, heads: 2, headDim: 4, bias: mask([2, 1, 3, 3], (i, _, b) => b === 0 || i > 0) }),
  // Left padding under a causal mask: the padding sees nothing.
  attention({ queries: 8, heads: 4, kvHeads: 2, headDim: 8, causal: true, bias: mask([1, 1, 8, 8], (_, j) => j > 2) }),
  attention({ queries: 4, heads: 2, headDim: 4, bias: mask([1, 1, 4, 4], () => false) }),
  {
    ...attention({ queries: 7, keys: 9, heads: 2, headDim: 8, bias: mask([1, 1, 7, 9], (_, key) => key < 7) }),
    float32Operands: [3],
  },
  attention({ queries: 0, keys: 3, heads: 2, headDim: 4 }),
  attention({ queries: 3, keys: 0, heads: 2, headDim: 4 }),
  attention({ batch: 0, queries: 3, heads: 2, headDim: 4 }),
]

const ropes = (
  [
    [1, 1, 1, 2],
    [2, 5, 3, 6],
    [1, 64, 4, 128],
    [3, 2, 1, 10],
    [1, 0, 2, 4],
  ] as const
).flatMap((shape) => {
  const { cos, sin } = rotation(shape[1], shape[3] / 2)
  return [true, false].flatMap((interleaved) => {
    const inDType = opCase('rope', [normal(shape, 70), cos, sin], { interleaved })
    const byFloat32 = { ...inDType, title: `${inDType.title} by tables in float32`, float32Operands: [1, 2] }
    return [inDType, byFloat32]
  })
})

interface Conv2dSizes {
  readonly x: Shape
  readonly weight: Shape
  readonly stride?: number
  readonly padding?: readonly number[]
}

function conv2d({ x, weight, stride = 1, padding = [0, 0, 0, 0] }: Conv2dSizes): OpCase {
  const note = `stride ${stride} padding ${padding.join()}`
  const inputs = [normal(x, 80), normal(weight, 81), normal(weight.slice(0, 1), 82)]
  return opCase('conv2d', inputs, { stride, padding }, note)
}

const spatial = [
  conv2d({ x: [1, 1, 1, 1], weight: [1, 1, 1, 1] }),
  conv2d({ x: [2, 3, 7, 5], weight: [4, 3, 3, 3], padding: [1, 1, 1, 1] }),
  conv2d({ x: [1, 2, 8, 9], weight: [3, 2, 3, 3], stride: 2, padding: [0, 1, 0, 1] }),
  conv2d({ x: [1, 2, 5, 6], weight: [2, 2, 2, 3], padding: [0, 1, 2, 0] }),
  conv2d({ x: [1, 2, 5, 5], weight: [2, 2, 3, 3], padding: [2, 0, 1, 1] }),
  conv2d({ x: [1, 33, 16, 17], weight: [65, 33, 1, 1] }),
  conv2d({ x: [1, 32, 24, 24], weight: [32, 32, 3, 3], padding: [1, 1, 1, 1] }),
  conv2d({ x: [0, 2, 4, 4], weight: [3, 2, 3, 3] }),
  conv2d({ x: [1, 0, 4, 4], weight: [3, 0, 3, 3] }),
  withAttributes('upsample_nearest2d', [normal([1, 1, 1, 1], 83)], { scale: 2 }),
  withAttributes('upsample_nearest2d', [normal([2, 3, 5, 7], 84)], { scale: 2 }),
  withAttributes('upsample_nearest2d', [normal([1, 2, 3, 2], 85)], { scale: 3 }),
  withAttributes('upsample_nearest2d', [normal([1, 2, 4, 4], 86)], { scale: 1 }),
  withAttributes('upsample_nearest2d', [normal([1, 2, 0, 4], 87)], { scale: 2 }),
]

/**
 * Cases of every operation: usual and odd sizes, 0 and 1, broadcasting, masks, all attributes. Not of `shard`, whose
 * attributes only a partition makes: the styles check it.
 */
export const OP_CASES: readonly OpCase[] = [
  ...elementwise,
  ...casts,
  ...linear,
  ...movement,
  ...norm,
  ...attentions,
  ...ropes,
  ...spatial,
]
