import { fileURLToPath } from 'node:url'
import { ort } from '@rankwise/backend-ort'
import { type Backend, readSafetensors, sizeOf, Tensor } from '@rankwise/core'
import { expectClose, onRanks, referencePath, relativeRms } from '@rankwise/fixtures'
import fc from 'fast-check'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { AutoencoderKLFlux2, type TileProgress, type TilingOptions } from '../src/index.ts'
import { joinTiles } from '../src/vae/tile-blend.ts'
import { cutTile, decodeGrid, encodeGrid, resolveTiling, type TileGrid, tilesOf } from '../src/vae/tiling.ts'
import { codeOf, differingElements } from './support.ts'
import type { SharedTiles, SharedTilesResult } from './workers/shared-tiles.ts'

/** As for the whole autoencoder. */
const TOLERANCE = { relativeRms: 5e-6 }

const GOLDEN = fileURLToPath(new URL('goldens/tiling.safetensors', import.meta.url))
const goldens = await readSafetensors(GOLDEN)
const golden = (name: string) => goldens.get(name) as Tensor<'float32'>

/** The tilings of make_images.py, and how many tiles they give. */
const CASES = [
  ['quarter', { tileSampleMinSize: 64, tileOverlapFactor: 0.25 }, 6],
  ['half', { tileSampleMinSize: 32, tileOverlapFactor: 0.5 }, 15],
  ['none', { tileSampleMinSize: 32, tileOverlapFactor: 0 }, 6],
  ['eighth', { tileSampleMinSize: 64, tileOverlapFactor: 0.125 }, 6],
] as const

const WORKER = new URL('workers/shared-tiles.ts', import.meta.url)

let backend: Backend
let vae: AutoencoderKLFlux2
beforeAll(async () => {
  backend = await ort({ device: 'cpu', threads: 1 })
  vae = await AutoencoderKLFlux2.fromPretrained(referencePath('flux2-tiny'), { subfolder: 'vae', backend })
})
afterAll(async () => {
  await vae.dispose()
  await backend.dispose()
})

describe('a tiled autoencoder', () => {
  it.each(CASES)('decodes and encodes as that of diffusers: %s', async (name, options) => {
    vae.enableTiling(options)
    expectClose(await vae.decode(golden(`${name}.latents`)), golden(`${name}.image`), TOLERANCE)
    expectClose(await vae.encode(golden(`${name}.image`)), golden(`${name}.mode`), TOLERANCE)
  })

  it.each(CASES)('differs from one that is not, and from another tiling: %s', async (name, options) => {
    const difference = async () =>
      Math.min(
        relativeRms(await vae.decode(golden(`${name}.latents`)), golden(`${name}.image`)),
        relativeRms(await vae.encode(golden(`${name}.image`)), golden(`${name}.mode`)),
      )
    vae.disableTiling()
    expect(await difference()).toBeGreaterThan(100 * TOLERANCE.relativeRms)
    vae.enableTiling({ ...options, tileOverlapFactor: options.tileOverlapFactor === 0.5 ? 0.25 : 0.5 })
    expect(await difference()).toBeGreaterThan(100 * TOLERANCE.relativeRms)
  })

  it('codes what fits in one tile as a whole', async () => {
    const latents = golden('half.latents')
    vae.disableTiling()
    const whole = await vae.decode(latents)
    vae.enableTiling({ tileSampleMinSize: 96 })
    const progress: TileProgress[] = []
    const decoded = await vae.decode(latents, { onProgress: (tile) => progress.push(tile) })
    expect(differingElements(decoded.data, whole.data)).toBe(0)
    expect(progress).toEqual([{ finishedTiles: 1, totalTiles: 1 }])
  })

  it('reports every tile and stops between two', async () => {
    vae.enableTiling(CASES[0][1])
    const progress: TileProgress[] = []
    await vae.decode(golden('quarter.latents'), { onProgress: (tile) => progress.push(tile) })
    expect(progress).toEqual([1, 2, 3, 4, 5, 6].map((finishedTiles) => ({ finishedTiles, totalTiles: 6 })))
    const controller = new AbortController()
    let tiles = 0
    const onProgress = () => {
      if (++tiles === 2) controller.abort()
    }
    const { signal } = controller
    expect(await codeOf(() => vae.encode(golden('quarter.image'), { signal, onProgress }))).toBe('ABORTED')
    expect(tiles).toBe(2)
  })

  it('keeps the entries of a batch apart', async () => {
    vae.enableTiling(CASES[1][1])
    const { shape, data } = golden('half.latents')
    const negative = data.map((value) => -value)
    const batch = Tensor.float32([2, ...shape.slice(1)], Float32Array.from([...negative, ...data]))
    const images = (await vae.decode(batch)).data as Float32Array
    expectClose(images.subarray(images.length / 2), golden('half.image').data, TOLERANCE)
  })

  it('has the tile size of its config', () => {
    vae.enableTiling()
    expect(vae.tiling).toEqual({ tileSampleMinSize: 128, tileLatentMinSize: 16, tileOverlapFactor: 0.25 })
    vae.disableTiling()
    expect(vae.tiling).toBeUndefined()
    expect(AutoencoderKLFlux2.fromConfig({ sample_size: [512, 256] }).config.sampleSize).toBe(512)
    expect(AutoencoderKLFlux2.fromConfig({}).config.sampleSize).toBe(1024)
  })

  it.each([
    [{ tileSampleMinSize: 60 }, 'OPTION_INVALID'],
    [{ tileSampleMinSize: 0 }, 'OPTION_INVALID'],
    [{ tileSampleMinSize: 48, tileOverlapFactor: 0.25 }, 'OPTION_INVALID'],
    [{ tileSampleMinSize: 64, tileOverlapFactor: 1 }, 'OPTION_INVALID'],
    [{ tileSampleMinSize: 64, tileOverlapFactor: -0.25 }, 'OPTION_INVALID'],
    [{ tileSampleMinSize: 64, tileOverlapFactor: Number.NaN }, 'OPTION_INVALID'],
    [{ tileSampleMinHeight: 64 }, 'OPTION_UNKNOWN'],
  ])('refuses %j', async (options, code) => {
    expect(await codeOf(() => vae.enableTiling(options as TilingOptions))).toBe(code)
  })

  it('refuses images that are no whole latents', async () => {
    vae.enableTiling({ tileSampleMinSize: 32 })
    expect(await codeOf(() => vae.encode(Tensor.zeros('float32', [1, 3, 32, 36])))).toBe('IMAGE_SHAPE')
  })
})

describe('tiles', () => {
  const SCALE = 8
  /** Sizes of tiles and overlaps in latents. */
  const tilings = fc
    .tuple(fc.integer({ min: 1, max: 16 }), fc.nat(15))
    .filter(([size, overlap]) => overlap < size)
    .map(([size, overlap]) => ({ tileSampleMinSize: size * SCALE, tileOverlapFactor: overlap / size }))
    .filter((options) => {
      try {
        return resolveTiling(options, 1, SCALE) !== undefined
      } catch {
        // Not every quotient comes back whole from floating point; those are refused.
        return false
      }
    })
  const sides = fc.integer({ min: 1, max: 50 })

  it('cover the input, and what is kept of them is the output', () => {
    fc.assert(
      fc.property(tilings, sides, sides, (options, height, width) => {
        const grid = decodeGrid(resolveTiling(options, 1, SCALE))
        const tiles = tilesOf([1, 1, height, width], grid)
        const outputs = tiles.map((tile) => Tensor.zeros('float32', [1, 1, tile.height * SCALE, tile.width * SCALE]))
        expect(joinTiles(tiles, outputs, grid).shape).toEqual([1, 1, height * SCALE, width * SCALE])
      }),
    )
  })

  it('that do not change join to what was cut', () => {
    const grids = tilings.map((options) => {
      const { tileSize, stride } = decodeGrid(resolveTiling(options, 1, SCALE))
      return { tileSize, stride, blendExtent: tileSize - stride, rowLimit: stride } satisfies TileGrid
    })
    fc.assert(
      fc.property(grids, sides, sides, fc.constantFrom('float32', 'bfloat16'), (grid, height, width, dtype) => {
        const shape = [2, 3, height, width]
        // Small whole numbers: fading between equal values is nearly exact.
        const input = Tensor.float32(
          shape,
          Float32Array.from({ length: sizeOf(shape) }, (_, i) => (i * 7) % 64),
        ).cast(dtype as 'float32')
        const tiles = tilesOf(shape, grid)
        const joined = joinTiles(
          tiles,
          tiles.map((tile) => cutTile(input, tile)),
          grid,
        )
        expect([joined.dtype, joined.shape]).toEqual([dtype, shape])
        const [actual, expected] = [joined.cast('float32').data, input.cast('float32').data]
        // Where the last tile is narrower than the overlap, diffusers fades it from other places.
        if (isFull(height, grid) && isFull(width, grid)) {
          const most = dtype === 'float32' ? 1e-4 : 1
          expect(actual.findIndex((value, i) => !(Math.abs(value - (expected[i] as number)) <= most))).toBe(-1)
        }
      }),
    )
  })

  /** Whether no tile along a side is narrower than its overlap. */
  const isFull = (side: number, { stride, blendExtent }: TileGrid) =>
    side <= stride || ((side - 1) % stride) + 1 >= blendExtent

  it('both directions agree on the size', () => {
    fc.assert(
      fc.property(tilings, sides, sides, (options, height, width) => {
        const tiling = resolveTiling(options, 1, SCALE)
        const decode = tilesOf([1, 1, height, width], decodeGrid(tiling))
        const encode = tilesOf([1, 1, height * SCALE, width * SCALE], encodeGrid(tiling))
        expect(encode.map(({ height, width }) => [height / SCALE, width / SCALE])).toEqual(
          decode.map(({ height, width }) => [height, width]),
        )
      }),
    )
  })

  it('fade linearly, the upper into the lower before the left into the right', () => {
    const grid = { tileSize: 4, stride: 2, blendExtent: 2, rowLimit: 2 }
    const tiles = tilesOf([1, 1, 4, 4], grid)
    const outputs = tiles.map(({ height, width }, i) =>
      Tensor.float32([1, 1, height, width], new Float32Array(height * width).fill(i)),
    )
    expect([...joinTiles(tiles, outputs, grid).data]).toEqual([
      0, 0, 0, 0.5, 0, 0, 0, 0.5, 0, 0, 0, 0.25, 1, 1, 1, 1.375,
    ])
  })
})

describe('tiles shared among ranks', () => {
  const [name, tiling, tiles] = CASES[1]
  let ranks: readonly SharedTilesResult[]
  beforeAll(async () => {
    const work: SharedTiles = { path: GOLDEN, name, tiling }
    ranks = await onRanks<SharedTilesResult>(2, WORKER, work)
  })

  it('give every rank the bits that one computes alone', async () => {
    vae.enableTiling(tiling)
    const image = await vae.decode(golden(`${name}.latents`))
    const mode = await vae.encode(golden(`${name}.image`))
    for (const { decoded, encoded } of ranks) {
      expect(differingElements(decoded, image.data)).toBe(0)
      expect(differingElements(encoded, mode.data)).toBe(0)
    }
  })

  it('are each coded by one rank', () => {
    const own = ranks.map(({ progress }) => progress.at(-1)?.totalTiles ?? 0)
    expect(own).toEqual([8, 7])
    expect(tiles).toBe(15)
    for (const [rank, { progress }] of ranks.entries()) {
      expect(progress.map(({ finishedTiles }) => finishedTiles)).toEqual([1, 2, 3, 4, 5, 6, 7, 8].slice(0, own[rank]))
    }
  })

  it('are refused where inputs or tilings differ, and the group goes on', () => {
    for (const { otherInput, otherTiling } of ranks) {
      expect(otherInput).toEqual({ code: 'INPUTS_DIFFER', differing: [1] })
      expect(otherTiling).toEqual({ code: 'INPUTS_DIFFER', differing: [1] })
    }
  })

  it('fail on all ranks when one is aborted', () => {
    expect(ranks.map(({ aborted }) => aborted.code)).toEqual(['ABORTED', 'ABORTED'])
  })
})
