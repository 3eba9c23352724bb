import { mkdir, open, readFile, rename, writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import { Flux2Transformer2DModel } from '@rankwise/models-flux2'
import { type Blocks, kleinConfig } from '../klein-config.ts'

const BYTES_PER_WEIGHT = 2
const CHUNK_BYTES = 16 * 1024 * 1024

/**
 * Makes a bfloat16 checkpoint in `folder`, in one safetensors file; keeps one that is there already.
 *
 * @returns bytes of the weights
 */
export async function makeCheckpoint(folder: string, blocks: Blocks): Promise<number> {
  const config = kleinConfig(blocks)
  const header: Record<string, unknown> = { __metadata__: { format: 'pt' } }
  let bytes = 0
  for (const [name, { shape }] of Flux2Transformer2DModel.fromConfig(config).namedParameters()) {
    const length = BYTES_PER_WEIGHT * shape.reduce((product, size) => product * size, 1)
    header[name] = { dtype: 'BF16', shape, data_offsets: [bytes, bytes + length] }
    bytes += length
  }
  const path = join(folder, 'diffusion_pytorch_model.safetensors')
  const text = JSON.stringify(config)
  const made = await readFile(join(folder, 'config.json'), 'utf8').catch(() => undefined)
  if (made === text) return bytes
  await mkdir(folder, { recursive: true })
  await writeWeights(path, header, bytes)
  await writeFile(join(folder, 'config.json'), text)
  return bytes
}

async function writeWeights(path: string, header: object, bytes: number): Promise<void> {
  const json = JSON.stringify(header)
  const padded = Buffer.from(json.padEnd(Math.ceil(json.length / 8) * 8))
  const length = Buffer.alloc(8)
  length.writeBigUInt64LE(BigInt(padded.length))
  await using file = await open(`${path}.incomplete`, 'w')
  await file.write(Buffer.concat([length, padded]))
  const chunk = randomWeights(CHUNK_BYTES / BYTES_PER_WEIGHT)
  for (let written = 0; written < bytes; written += chunk.byteLength) {
    await file.write(chunk, 0, Math.min(chunk.byteLength, bytes - written))
  }
  await file.sync()
  await rename(`${path}.incomplete`, path)
}

/** bfloat16 numbers of 2^-7 to 2^-5, of both signs: small enough for activations to stay finite. */
function randomWeights(count: number): Uint8Array {
  const weights = new Uint16Array(count)
  let state = 1
  for (let i = 0; i < count; i++) {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0
    const exponent = 120 + ((state >>> 30) % 2)
    weights[i] = ((state >>> 16) & 0x8000) | (exponent << 7) | ((state >>> 8) & 0x7f)
  }
  return new Uint8Array(weights.buffer)
}
