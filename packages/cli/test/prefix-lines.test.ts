import { PassThrough, Readable, Writable } from 'node:stream'
import { setTimeout } from 'node:timers/promises'
import fc from 'fast-check'
import { expect, test } from 'vitest'
import { prefixLines } from '../src/prefix-lines.ts'

async function prefixed(chunks: readonly Uint8Array[]): Promise<Buffer> {
  const written: Buffer[] = []
  const to = new Writable({
    write(chunk, _encoding, done) {
      written.push(chunk)
      done()
    },
  })
  await prefixLines(Readable.from(chunks.map((chunk) => Buffer.from(chunk))), to, '[3] ')
  return Buffer.concat(written)
}

test('lines are the same however the bytes arrive', async () => {
  const line = fc.string({ unit: 'grapheme' }).map((text) => text.replaceAll('\n', ''))
  const property = fc.asyncProperty(fc.array(line), fc.array(fc.nat(20)), async (lines, sizes) => {
    const bytes = Buffer.from(lines.map((text) => `${text}\n`).join(''))
    const chunks: Buffer[] = []
    let start = 0
    for (const size of sizes) {
      chunks.push(bytes.subarray(start, start + size))
      start += size
    }
    chunks.push(bytes.subarray(start))
    expect((await prefixed(chunks)).toString()).toBe(lines.map((text) => `[3] ${text}\n`).join(''))
  })
  await fc.assert(property)
})

test('bytes that are no UTF-8 pass unchanged', async () => {
  expect(await prefixed([Uint8Array.of(0xff, 0x00, 0x0a)])).toEqual(
    Buffer.from([0x5b, 0x33, 0x5d, 0x20, 0xff, 0, 0x0a]),
  )
})

test('a line without end is broken between characters', async () => {
  const text = `a${'é'.repeat(100_000)}`
  const lines = (await prefixed([Buffer.from(text)])).toString().split('\n').slice(0, -1)
  expect(lines.length).toBeGreaterThan(2)
  expect(lines.map((line) => line.slice(4)).join('')).toBe(text)
})

test('a slow reader slows the writer down', async () => {
  const from = new PassThrough()
  const reads: string[] = []
  const queued: number[] = []
  const to: Writable = new Writable({
    async write(chunk, _encoding, done) {
      queued.push(to.writableLength - chunk.length)
      reads.push(String(chunk))
      await setTimeout(10)
      done()
    },
  })
  const done = prefixLines(from, to, '')
  for (let i = 0; i < 5; i++) {
    from.write(`${i}\n`)
    await setTimeout(1)
  }
  from.end()
  await done
  // Nothing was written before what came before it was taken.
  expect(queued.every((bytes) => bytes === 0)).toBe(true)
  expect(reads.join('')).toBe('0\n1\n2\n3\n4\n')
})
