import { writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import fc from 'fast-check'
import { expect, test } from 'vitest'
import { SafetensorsFile } from '../../src/checkpoint/safetensors-file.ts'
import { parseHeader, type SafetensorsHeader } from '../../src/checkpoint/safetensors-header.ts'
import { RankwiseError } from '../../src/errors.ts'
import { patternBytes, rawFile, temporaryFolder } from './files.ts'

const FILE = '/weights.safetensors'

/** Names by bits, from the format's reference implementation. */
const DTYPES: readonly (readonly [bits: bigint, names: string])[] = [
  [64n, 'F64 I64 U64 C64'],
  [32n, 'F32 I32 U32'],
  [16n, 'F16 BF16 I16 U16'],
  [8n, 'I8 U8 BOOL F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ'],
  [6n, 'F6_E2M3 F6_E3M2'],
  [4n, 'F4'],
]

const HEADER = JSON.stringify({
  __metadata__: { format: 'pt', note: 'a "quoted" \\ note' },
  'blocks.0.weight': { dtype: 'F32', shape: [4, 6], data_offsets: [0, 96] },
  'blocks.0.bias': { dtype: 'BF16', shape: [4], data_offsets: [96, 104] },
  scalar: { dtype: 'I64', shape: [], data_offsets: [104, 112] },
  empty: { dtype: 'F16', shape: [0, 7], data_offsets: [112, 112] },
  quantized: { dtype: 'F8_E4M3', shape: [3, 3], data_offsets: [112, 121] },
  mask: { dtype: 'BOOL', shape: [7, 1], data_offsets: [121, 128] },
})
const DATA = patternBytes(128)
const VALID = rawFile(HEADER, DATA)

/** Numbers, strings and punctuation of the header, for mutations that stay close to JSON. */
const TOKENS: readonly string[] = HEADER.match(/"(?:[^"\\]|\\.)*"|\d+|[{}[\]:,]/g) ?? []

const ODD_TOKENS = [
  ...['0', '1', '-1', '-0', '1.5', '1e3', '1e400', '96', '128', '4294967296', '4611686018427387904'],
  ...['9007199254740991', '9007199254740992', '18446744073709551615', 'null', 'true', '{}', '[]', '""', '[[[[', '}'],
  ...['"F64"', '"I8"', '"F4"', '"F6_E3M2"', '"U64"', '"toString"', '"__metadata__"', '"__proto__"', '"\\u0000"', ' '],
]

const tokenIndex = fc.nat({ max: TOKENS.length - 1 })

const tokenMutation = fc.oneof(
  fc.record({ at: tokenIndex, by: fc.constantFrom(...ODD_TOKENS) }).map(({ at, by }) => TOKENS.with(at, by)),
  fc.tuple(tokenIndex, tokenIndex).map(([a, b]) => TOKENS.with(a, TOKENS[b] as string).with(b, TOKENS[a] as string)),
  fc.tuple(tokenIndex, fc.integer({ min: 1, max: 12 })).map(([at, count]) => TOKENS.toSpliced(at, count)),
  fc
    .tuple(tokenIndex, fc.integer({ min: 1, max: 20 }))
    .map(([at, count]) => TOKENS.toSpliced(at, 0, ...TOKENS.slice(at, at + count))),
  fc
    .tuple(tokenIndex, tokenIndex, fc.constantFrom(...ODD_TOKENS), fc.constantFrom(...ODD_TOKENS))
    .map(([a, b, x, y]) => TOKENS.with(a, x).with(b, y)),
)

const byteMutation = fc
  .array(fc.tuple(fc.nat({ max: VALID.length - DATA.length - 1 }), fc.integer({ min: 0, max: 255 })), {
    minLength: 1,
    maxLength: 4,
  })
  .map((changes) => {
    const bytes = Buffer.from(VALID)
    for (const [at, byte] of changes) bytes[at] = byte
    return bytes
  })

const truncation = fc.nat({ max: VALID.length - 1 }).map((size) => VALID.subarray(0, size))
const extension = fc.uint8Array({ minLength: 1, maxLength: 9 }).map((bytes) => Buffer.concat([VALID, bytes]))

const mutatedFile: fc.Arbitrary<Buffer> = fc.oneof(
  { weight: 6, arbitrary: tokenMutation.map((tokens) => rawFile(tokens.join(''), DATA)) },
  { weight: 3, arbitrary: byteMutation },
  { weight: 1, arbitrary: truncation },
  { weight: 1, arbitrary: extension },
)

test('a mutated header is refused with a code, or parsed to exactly what it says', () => {
  let accepted = 0
  fc.assert(
    fc.property(mutatedFile, (bytes) => {
      const header = codedOr(() => parseHeader(bytes, FILE, bytes.length))
      if (header === undefined) return
      accepted++
      expectConsistent(header, bytes)
    }),
    { numRuns: 10_000 },
  )
  // Names, metadata and equal-sized dtypes may change and leave a valid file: both outcomes must have been seen.
  expect(accepted).toBeGreaterThan(50)
})

test('a repeated key is refused wherever it is, however it is written', () => {
  const keys = [...HEADER.matchAll(/"((?:[^"\\]|\\.)*)":/g)]
  const escaped = (key: string) => [...key].map((c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, '0')}`).join('')
  fc.assert(
    fc.property(fc.constantFrom(...keys), fc.boolean(), fc.constantFrom('', ' ', '\n\t'), (match, escaping, blank) => {
      const key = escaping ? escaped(match[1] as string) : match[1]
      const text = `${HEADER.slice(0, match.index)}"${key}"${blank}:${blank}0,${HEADER.slice(match.index)}`
      expect(() => parseHeader(rawFile(text), FILE, 10_000)).toThrow(/SAFETENSORS_DUPLICATE_KEY/)
    }),
  )
})

test('no mutation, read from disk, gives bytes that its header does not name', async () => {
  const path = join(await temporaryFolder(), 'weights.safetensors')
  await fc.assert(
    fc.asyncProperty(mutatedFile, async (bytes) => {
      await writeFile(path, bytes)
      const file = await SafetensorsFile.open(path).catch(requireCode)
      if (file === undefined) return
      await using _ = file
      for (const { name, byteOffset, byteLength } of file.tensors.values()) {
        const tensor = await file.read(name).catch(requireCode)
        if (tensor === undefined) continue
        expect(Buffer.from(tensor.data.buffer as ArrayBuffer)).toEqual(
          bytes.subarray(byteOffset, byteOffset + byteLength),
        )
      }
    }),
    { numRuns: 500 },
  )
})

test('the oracle of this suite sees a parser that is wrong', () => {
  const header = parseHeader(VALID, FILE, VALID.length)
  expectConsistent(header, VALID)
  const mask = header.tensors.get('mask')
  if (mask === undefined) throw new Error('the valid header has a mask')
  const wrong = [
    { byteOffset: mask.byteOffset + 1 },
    { byteLength: 6 },
    { shape: [1, 7] },
    { dtype: 'F8_E5M2' as const },
  ]
  for (const change of wrong) {
    const tensors = new Map(header.tensors).set('mask', { ...mask, ...change })
    expect(() => expectConsistent({ ...header, tensors }, VALID)).toThrow()
  }
  const fewer = new Map([...header.tensors].filter(([name]) => name !== 'empty'))
  expect(() => expectConsistent({ ...header, tensors: fewer }, VALID)).toThrow()
})

/** What a header says, told by plain JSON and big integers. */
function expectConsistent({ tensors }: SafetensorsHeader, bytes: Buffer): void {
  const dataStart = 8n + bytes.readBigUInt64LE()
  const json: Record<string, { dtype: string; shape: number[]; data_offsets: [number, number] }> = JSON.parse(
    bytes.subarray(8, Number(dataStart)).toString(),
  )
  const names = Object.keys(json).filter((name) => name !== '__metadata__')
  expect([...tensors.keys()].sort()).toEqual(names.sort())
  let end = dataStart
  for (const [name, info] of tensors) {
    const entry = json[name]
    if (entry === undefined) throw new Error(`no entry for ${name}`)
    expect(info.name).toBe(name)
    expect(info.shape).toEqual(entry.shape)
    expect(TORCH_NAMES.get(entry.dtype) ?? entry.dtype).toBe(info.dtype)
    const bits = DTYPES.find(([, dtypes]) => dtypes.split(' ').includes(entry.dtype))?.[0] ?? 0n
    expect(BigInt(info.byteLength) * 8n).toBe(entry.shape.reduce((product, size) => product * BigInt(size), bits))
    expect(BigInt(info.byteOffset)).toBe(end)
    expect(entry.data_offsets.map(BigInt)).toEqual([end - dataStart, end - dataStart + BigInt(info.byteLength)])
    end += BigInt(info.byteLength)
  }
  expect(end).toBe(BigInt(bytes.length))
}

const TORCH_NAMES: ReadonlyMap<string, string> = new Map([
  ['F64', 'float64'],
  ['F32', 'float32'],
  ['F16', 'float16'],
  ['BF16', 'bfloat16'],
  ['I64', 'int64'],
  ['I32', 'int32'],
  ['I16', 'int16'],
  ['I8', 'int8'],
  ['U8', 'uint8'],
  ['BOOL', 'bool'],
])

/** The result, or `undefined` when it was refused with a code of the reader; every other error fails the test. */
function codedOr<T>(action: () => T): T | undefined {
  try {
    return action()
  } catch (error) {
    return requireCode(error)
  }
}

function requireCode(error: unknown): undefined {
  if (error instanceof RankwiseError && error.code.startsWith('SAFETENSORS_')) return
  throw error
}
