import { describe, expect, test } from 'vitest'
import { parseHeader } from '../../src/checkpoint/safetensors-header.ts'
import { expectCode, rawFile } from './files.ts'

const FILE = '/models/flux/weights.safetensors'

function parse(header: Parameters<typeof rawFile>[0], dataBytes: number) {
  const bytes = rawFile(header)
  return parseHeader(bytes, FILE, bytes.length + dataBytes)
}

function tensor(dtype: unknown, shape: unknown, begin: unknown, end: unknown) {
  return { dtype, shape, data_offsets: [begin, end] }
}

describe('valid headers', () => {
  test('gives every tensor its dtype, shape and absolute bytes', () => {
    const header = {
      __metadata__: { format: 'pt' },
      b: tensor('BF16', [2, 3], 4, 16),
      a: tensor('F32', [], 0, 4),
      'ü.weight': tensor('BOOL', [1], 16, 17),
    }
    const dataStart = rawFile(header).length
    const { tensors, metadata } = parse(header, 17)
    expect(metadata).toEqual(new Map([['format', 'pt']]))
    expect([...tensors.values()]).toEqual([
      { name: 'a', dtype: 'float32', shape: [], file: FILE, byteOffset: dataStart, byteLength: 4 },
      { name: 'b', dtype: 'bfloat16', shape: [2, 3], file: FILE, byteOffset: dataStart + 4, byteLength: 12 },
      { name: 'ü.weight', dtype: 'bool', shape: [1], file: FILE, byteOffset: dataStart + 16, byteLength: 1 },
    ])
  })

  test.each([
    ['F64', 'float64', 8],
    ['F32', 'float32', 4],
    ['F16', 'float16', 2],
    ['BF16', 'bfloat16', 2],
    ['I64', 'int64', 8],
    ['I32', 'int32', 4],
    ['I16', 'int16', 2],
    ['I8', 'int8', 1],
    ['U8', 'uint8', 1],
    ['BOOL', 'bool', 1],
    ['F8_E4M3', 'F8_E4M3', 1],
    ['C64', 'C64', 8],
    ['U16', 'U16', 2],
  ])('knows %s as %s of %i bytes', (name, dtype, bytes) => {
    expect(parse({ t: tensor(name, [3], 0, 3 * bytes) }, 3 * bytes).tensors.get('t')?.dtype).toBe(dtype)
  })

  test('knows dtypes smaller than a byte', () => {
    const { tensors } = parse({ a: tensor('F4', [2, 3], 0, 3), b: tensor('F6_E2M3', [4], 3, 6) }, 6)
    expect([...tensors.values()].map((info) => info.byteLength)).toEqual([3, 3])
  })

  test('has room for 150 000 tensors', () => {
    const entries = Array.from(
      { length: 150_000 },
      (_, i) => `"blocks.${i}.weight":{"dtype":"BF16","shape":[1,0],"data_offsets":[0,0]}`,
    )
    expect(parse(`{${entries.join()}}`, 0).tensors.size).toBe(150_000)
  })

  test('allows zero-size tensors, an empty header and padding', () => {
    expect(parse({ a: tensor('F32', [0, 3], 0, 0), b: tensor('U8', [1], 0, 1) }, 1).tensors.size).toBe(2)
    expect(parse('{}', 0).tensors.size).toBe(0)
    expect(parse(`${JSON.stringify({ a: tensor('U8', [1], 0, 1) })}     `, 1).tensors.size).toBe(1)
  })

  test('takes names that objects inherit for what they are', () => {
    const names = ['__proto__', 'constructor', 'toString', '']
    const entries = names.map(
      (name, i) => `${JSON.stringify(name)}:{"dtype":"U8","shape":[1],"data_offsets":[${i},${i + 1}]}`,
    )
    expect([...parse(`{${entries.join(',')}}`, names.length).tensors.keys()]).toEqual(names)
    expect(({} as Record<string, unknown>).dtype).toBeUndefined()
  })

  test('allows the same key in different objects, and any text in names', () => {
    const names = ['dtype', 'a"b', 'c\\', '{', '":', 'new\nline']
    const entries = names.map((name, i) => [name, tensor('U8', [1], i, i + 1)])
    expect([...parse(Object.fromEntries(entries), names.length).tensors.keys()]).toEqual(names)
  })
})

describe('refused headers', () => {
  const big = 2 ** 53 - 1
  const refused: [
    what: string,
    code: string,
    header: Parameters<typeof rawFile>[0],
    dataBytes: number,
    ...texts: string[],
  ][] = [
    ['an array', 'SAFETENSORS_HEADER_JSON', '[]', 0, FILE],
    ['leading blanks', 'SAFETENSORS_HEADER_JSON', ' {}', 0],
    ['a byte order mark', 'SAFETENSORS_HEADER_JSON', '\ufeff{}', 0],
    ['invalid UTF-8', 'SAFETENSORS_HEADER_JSON', Uint8Array.of(0x7b, 0x22, 0xff, 0x22, 0x7d), 0, 'UTF-8'],
    ['broken JSON', 'SAFETENSORS_HEADER_JSON', '{"a":', 0, FILE],
    ['an unterminated string', 'SAFETENSORS_HEADER_JSON', '{"a', 0],
    ['a bad escape in a key', 'SAFETENSORS_HEADER_JSON', '{"\\x":1}', 0],
    ['deep nesting', 'SAFETENSORS_HEADER_JSON', `{"a":${'['.repeat(100_000)}`, 0, 'at most 3 deep'],
    ['an entry that is no object', 'SAFETENSORS_HEADER_JSON', { a: 1 }, 0, FILE, 'tensor "a"'],
    ['a duplicate tensor', 'SAFETENSORS_DUPLICATE_KEY', '{"a":{},"a":{}}', 0, FILE, '"a"'],
    ['an escaped duplicate', 'SAFETENSORS_DUPLICATE_KEY', '{"a":{},"\\u0061":{}}', 0],
    ['a duplicate field', 'SAFETENSORS_DUPLICATE_KEY', '{"a":{"dtype":"U8","dtype" :"I8"}}', 0, 'dtype'],
    ['two metadata', 'SAFETENSORS_DUPLICATE_KEY', '{"__metadata__":{},"__metadata__":{}}', 0],
    ['metadata of numbers', 'SAFETENSORS_METADATA', { __metadata__: { step: 1 } }, 0, FILE],
    ['metadata as text', 'SAFETENSORS_METADATA', { __metadata__: 'pt' }, 0],
    ['an unknown dtype', 'SAFETENSORS_DTYPE', { a: tensor('F33', [1], 0, 4) }, 4, FILE, '"a"', 'F33'],
    ['an inherited name as dtype', 'SAFETENSORS_DTYPE', { a: tensor('constructor', [1], 0, 4) }, 4],
    ['no dtype', 'SAFETENSORS_DTYPE', { a: { shape: [1], data_offsets: [0, 4] } }, 4, 'missing'],
    ['no shape', 'SAFETENSORS_SHAPE', { a: { dtype: 'F32', data_offsets: [0, 4] } }, 4, 'missing'],
    ['a negative size', 'SAFETENSORS_SHAPE', { a: tensor('F32', [-1], 0, 4) }, 4, '[-1]'],
    ['a negative zero', 'SAFETENSORS_SHAPE', '{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}', 0],
    ['a fractional size', 'SAFETENSORS_SHAPE', { a: tensor('F32', [1.5], 0, 6) }, 6],
    ['a size as text', 'SAFETENSORS_SHAPE', { a: tensor('F32', ['1'], 0, 4) }, 4],
    ['a size over 2^53', 'SAFETENSORS_SHAPE', { a: tensor('U8', [2 ** 53], 0, 1) }, 1],
    ['a product over 2^53', 'SAFETENSORS_SHAPE', { a: tensor('F32', [big, big], 0, 4) }, 4, 'overflow'],
    // Modulo 2^64 these elements are 4 bytes; an unchecked product would match.
    ['a wrapping product', 'SAFETENSORS_SHAPE', { a: tensor('U8', [4194305, 4194305, 211106198978564], 0, 4) }, 4],
    ['a product that a later zero hides', 'SAFETENSORS_SHAPE', { a: tensor('U8', [big, big, 0], 0, 0) }, 0],
    ['65 dimensions', 'SAFETENSORS_SHAPE', { a: tensor('U8', Array(65).fill(1), 0, 1) }, 1, 'at most 64'],
    ['half a byte', 'SAFETENSORS_SHAPE', { a: tensor('F4', [3], 0, 2) }, 2, 'whole bytes'],
    ['one offset', 'SAFETENSORS_OFFSETS', { a: { dtype: 'U8', shape: [1], data_offsets: [0] } }, 1],
    ['no offsets', 'SAFETENSORS_OFFSETS', { a: { dtype: 'U8', shape: [1] } }, 1, 'missing'],
    ['offsets in reverse', 'SAFETENSORS_OFFSETS', { a: tensor('U8', [1], 1, 0) }, 1, '[1,0]'],
    ['negative offsets', 'SAFETENSORS_OFFSETS', { a: tensor('U8', [1], -1, 0) }, 1],
    [
      'too few bytes',
      'SAFETENSORS_OFFSETS',
      { a: tensor('F32', [2, 3], 0, 20) },
      20,
      FILE,
      '"a"',
      '20',
      '24',
      '[2, 3]',
    ],
    ['too many bytes', 'SAFETENSORS_OFFSETS', { a: tensor('F32', [], 0, 5) }, 5],
    ['an overlap', 'SAFETENSORS_OVERLAP', { a: tensor('U8', [4], 0, 4), b: tensor('U8', [4], 3, 7) }, 7, '"a"', '"b"'],
    [
      'an empty tensor in another',
      'SAFETENSORS_OVERLAP',
      { a: tensor('U8', [4], 0, 4), b: tensor('U8', [0], 2, 2) },
      4,
    ],
    [
      'two tensors on the same bytes',
      'SAFETENSORS_OVERLAP',
      { a: tensor('U8', [4], 0, 4), b: tensor('I8', [4], 0, 4) },
      4,
    ],
    ['a hole', 'SAFETENSORS_HOLE', { a: tensor('U8', [4], 0, 4), b: tensor('U8', [4], 5, 9) }, 9, '"a"', '"b"'],
    ['a hole before the first', 'SAFETENSORS_HOLE', { a: tensor('U8', [4], 1, 5) }, 5, 'the header', '"a"'],
    ['bytes after the last', 'SAFETENSORS_HOLE', { a: tensor('U8', [4], 0, 4) }, 6, '"a"', 'the end of the file'],
    ['data without tensors', 'SAFETENSORS_HOLE', '{}', 1],
    [
      'data that is cut',
      'SAFETENSORS_TRUNCATED',
      { a: tensor('U8', [4], 0, 4), b: tensor('U8', [4], 4, 8) },
      7,
      FILE,
      '"b"',
    ],
    ['offsets beyond the file', 'SAFETENSORS_TRUNCATED', { a: tensor('U8', [2 ** 40], 0, 2 ** 40) }, 8, '"a"'],
  ]

  test.each(refused)('%s', async (_, code, header, dataBytes, ...texts) => {
    await expectCode(() => parse(header, dataBytes), code, ...texts)
  })

  test('a file that ends before or within its header', async () => {
    const bytes = rawFile({ a: tensor('U8', [4], 0, 4) })
    for (let size = 0; size < bytes.length; size++) {
      await expectCode(() => parseHeader(bytes.subarray(0, size), FILE, size), 'SAFETENSORS_TRUNCATED', FILE, size)
    }
  })

  test.each([0n, 1n, 100_000_001n, 2n ** 31n, 2n ** 53n, 2n ** 63n, 2n ** 64n - 1n])(
    'a header of %d bytes',
    async (length) => {
      const bytes = Buffer.alloc(16)
      bytes.writeBigUInt64LE(length)
      await expectCode(() => parseHeader(bytes, FILE, 2 ** 40), 'SAFETENSORS_HEADER_LENGTH', FILE, length)
    },
  )

  // Each took between a minute and forever, and up to 3 GB, before the parts were counted.
  test.each([
    ['tensors', '"t#":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}', 200_000],
    ['keys', '"#":0', 1_100_000],
    ['arrays', '"a#":[],"b#":[[],[],[]]', 300_000],
    ['objects', '"a#":{},"b#":[{},{},{}]', 300_000],
    ['numbers', `"a#":[${'0,'.repeat(999)}0]`, 2_100],
  ])('millions of %s', async (_, entry, count) => {
    const entries = Array.from({ length: count }, (_, i) => entry.replaceAll('#', String(i)))
    await expectCode(() => parse(`{${entries.join()}}`, 0), 'SAFETENSORS_HEADER_JSON', FILE, 'at most 2000000')
  })

  test('names of any length and content, quoted and shortened', async () => {
    const name = `\u001b[31m\n${'x'.repeat(1_000_000)}`
    const error = await Promise.resolve({ [name]: tensor('F33', [1], 0, 4) })
      .then((header) => parse(header, 4))
      .catch((thrown: Error) => thrown)
    const message = (error as Error).message
    expect(message.length).toBeLessThan(1000)
    expect(message).toContain('\\u001b[31m\\n')
    expect(message).not.toContain('\u001b')
  })
})
