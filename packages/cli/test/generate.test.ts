import { existsSync } from 'node:fs'
import { mkdir, mkdtemp, readdir, readFile, rm, symlink, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { directory as demoDirectory } from '@rankwise/demo-flux2'
import { Image } from '@rankwise/diffusion'
import { loadGolden, referencePath } from '@rankwise/fixtures'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import type { GenerationSummary } from '../src/summary.ts'
import { rankwise, startRankwise } from './rankwise.ts'

const PROMPT = 'a photo of a cat holding a sign that says hello world'

let folder: string
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), 'rankwise-generate-'))
})
afterAll(() => rm(folder, { recursive: true }))

async function picture(path: string): Promise<Uint8Array> {
  return Image.fromPng(await readFile(path)).data
}

/** Share of bytes that differ; any by more than 1 level counts as all. */
function differing(actual: Uint8Array, expected: Uint8Array): number {
  const apart = Array.from(actual, (value, i) => Math.abs(value - (expected[i] as number)))
  return Math.max(...apart) > 1 ? 1 : apart.filter((distance) => distance > 0).length / apart.length
}

describe('rankwise generate', () => {
  it.each([1, 2, 4])('draws what diffusers draws from flux2-klein-tiny on %i ranks', async (tp) => {
    const out = join(folder, `klein-${tp}.png`)
    const options = ['--seed', '42', '--steps', '4', '--height', '128', '--width', '128', '--guidance', '4']
    const { code, stdout, stderr } = await rankwise(
      ...['generate', referencePath('flux2-klein-tiny'), '--prompt', PROMPT, '--tp', String(tp), ...options],
      ...['--max-sequence-length', '512', '--backend', 'ort', '--threads', '1', '--out', out, '--json'],
    )
    expect(code, stderr).toBe(0)
    const summary: GenerationSummary = JSON.parse(stdout)
    expect(summary).toMatchObject({
      out,
      prompt: PROMPT,
      seed: '42',
      height: 128,
      width: 128,
      backend: expect.stringMatching(/^ort-(capi|binding)$/),
      dtype: 'float32',
      ranks: tp,
    })
    // The process alone takes more than 50 MB, and a model of 1 MB less than 2 GB.
    for (const { peakAnonBytes } of summary.transformer.ranks) {
      expect(peakAnonBytes).toBeGreaterThan(50e6)
      expect(peakAnonBytes).toBeLessThan(2e9)
    }
    const { fullBytes, ranks } = summary.transformer
    expect(ranks.map(({ rank }) => rank)).toEqual(Array.from({ length: tp }, (_, rank) => rank))
    // Embedders, modulations and norms are replicated: 23 % of this tiny model.
    for (const { localBytes } of ranks) expect(localBytes / fullBytes).toBeCloseTo(0.2324 + (1 - 0.2324) / tp, 3)
    const golden = await picture(referencePath('goldens', 'pipeline', 'klein.t2i.128x128.distilled.png'))
    expect(differing(await picture(out), golden)).toBeLessThanOrEqual(0.001)
  })

  it('draws from reference images with the pipeline that the folder names', async () => {
    const golden = 'dev.i2i.64x96.two_refs'
    const tensors = await loadGolden(`pipeline/${golden}.safetensors`)
    const images = await Promise.all(
      [0, 1].map(async (i) => {
        const { shape, data } = tensors.get(`ref_image_u8.${i}`)
        const path = join(folder, `reference-${i}.png`)
        await new Image(shape[1] as number, shape[0] as number, data as Uint8Array).save(path)
        return ['--image', path]
      }),
    )
    const out = join(folder, 'dev.png')
    const options = [
      '--steps',
      '4',
      '--height',
      '64',
      '--width',
      '96',
      '--guidance',
      '4',
      '--max-sequence-length',
      '128',
    ]
    const { code, stderr } = await rankwise(
      ...['generate', referencePath('flux2-tiny'), '--prompt', PROMPT, ...images.flat()],
      ...[...options, '--tp', '2', '--threads', '1', '--out', out],
    )
    expect(code, stderr).toBe(0)
    const expected = await picture(referencePath('goldens', 'pipeline', `${golden}.png`))
    expect(differing(await picture(out), expected)).toBeLessThanOrEqual(0.001)
  })

  it('refuses a reference image before it loads anything', async () => {
    const result = await rankwise('generate', '--image', join(folder, 'nowhere.png'), '--out', join(folder, 'none.png'))
    expect(result).toMatchObject({ code: 1, stdout: '' })
    expect(result.stderr).toMatch(/^\[IMAGE_READ\]/)
  })

  it('draws the demo with what it was trained for, and says what it did', async () => {
    const out = join(folder, 'demo.png')
    const { code, stdout, stderr } = await rankwise('generate', '--tp', '2', '--threads', '1', '--out', out)
    expect(code, stderr).toBe(0)
    expect(stderr).toMatch(/loaded transformer: 5\.4 MB[\s\S]*step 12 \/ 12/)
    expect(stdout).toMatch(
      /64 x 64 pixels on 2 ranks \(ort-(?:capi|binding), float32\)[\s\S]*rank 0: 5\.4 of 9\.2 MB.*\n.*rank 1: 5\.4 of 9\.2 MB/,
    )
    const golden = await picture(fileURLToPath(new URL('../../demo-flux2/golden/cat-blue.png', import.meta.url)))
    expect(differing(await picture(out), golden)).toBeLessThanOrEqual(0.001)
  })

  it('says where the time of every rank went, and writes a trace', async () => {
    const trace = join(folder, 'trace.json')
    const { code, stdout, stderr } = await rankwise(
      ...['generate', '--steps', '2', '--tp', '2', '--threads', '1', '--out', join(folder, 'traced.png')],
      ...['--profile', '--trace', trace, '--json'],
    )
    expect(code, stderr).toBe(0)
    const { profile = [] }: GenerationSummary = JSON.parse(stdout)
    expect(profile).toHaveLength(2)
    for (const graphs of profile) {
      const [transformer] = graphs.filter(({ graph }) => graph === 'Flux2Transformer2DModel.forward')
      // The demo takes guidance: two runs of each step.
      expect(transformer).toMatchObject({ runs: 4 })
      const { seconds = 0, segmentSeconds = 0, allReduceSeconds = 0, allReduces = 0 } = transformer ?? {}
      expect(allReduces).toBeGreaterThan(0)
      expect(segmentSeconds).toBeGreaterThan(0)
      expect(segmentSeconds + allReduceSeconds).toBeLessThanOrEqual(seconds)
    }
    const { traceEvents } = JSON.parse(await readFile(trace, 'utf8'))
    const stages = traceEvents.filter(({ ph, pid }: { ph: string; pid: number }) => ph === 'b' && pid === 1)
    expect(stages.map(({ name }: { name: string }) => name)).toEqual(
      expect.arrayContaining(['load Flux2Transformer2DModel', 'encode', 'step 1', 'step 2', 'decode']),
    )
    for (const pid of [0, 1]) {
      const own = traceEvents.filter((event: { pid: number }) => event.pid === pid)
      expect(own.filter(({ cat }: { cat: string }) => cat === 'all_reduce')).toHaveLength(
        profile[pid]?.reduce((sum, { allReduces }) => sum + allReduces, 0) ?? -1,
      )
    }
  })

  it('draws the same with a text encoder that is loaded for the prompt alone', async () => {
    const out = join(folder, 'demo-low-memory.png')
    const { code, stderr } = await rankwise('generate', '--low-memory', '--tp', '2', '--threads', '1', '--out', out)
    expect(code, stderr).toBe(0)
    // Otherwise it is loaded before the first step of the transformer that has its weights by then.
    expect(stderr).toMatch(/loaded transformer[\s\S]*loaded vae[\s\S]*loaded text_encoder[\s\S]*step 1 /)
    expect(await picture(out)).toEqual(await picture(join(folder, 'demo.png')))
  })

  it('draws in bfloat16, with the VAE in float32, near to float32', async () => {
    const out = join(folder, 'demo-bfloat16.png')
    const { code, stdout, stderr } = await rankwise(
      ...['generate', '--dtype', 'bfloat16', '--dtype', 'vae=float32', '--tp', '2', '--threads', '1', '--out', out],
      '--json',
    )
    expect(code, stderr).toBe(0)
    expect(JSON.parse(stdout)).toMatchObject({ dtype: 'bfloat16' })
    const [actual, expected] = [await picture(out), await picture(join(folder, 'demo.png'))]
    const distance =
      actual.reduce((sum, value, i) => sum + Math.abs(value - (expected[i] as number)), 0) / actual.length
    expect(distance).toBeGreaterThan(0)
    expect(distance).toBeLessThan(8)
  })

  it('draws the same over TCP, and says so', async () => {
    const out = join(folder, 'demo-tcp.png')
    process.env.RANKWISE_TRANSPORT = 'tcp'
    const { code, stderr } = await rankwise('generate', '--tp', '2', '--threads', '1', '--out', out).finally(() => {
      delete process.env.RANKWISE_TRANSPORT
    })
    expect(code, stderr).toBe(0)
    expect(stderr.match(/collectives: tcp, as transport 'tcp' was asked for/g)).toHaveLength(1)
    expect(await picture(out)).toEqual(await picture(join(folder, 'demo.png')))
  })

  it('refuses a degree once, before ranks are started', async () => {
    const { code, stderr } = await rankwise('generate', '--tp', '3', '--out', join(folder, 'none.png'))
    expect(code).toBe(1)
    expect(stderr.match(/HEADS_NOT_DIVISIBLE/g)).toHaveLength(1)
    expect(stderr).toContain('legalDegrees [1, 2, 4, 8]')
  })

  it.each([
    ['a folder without a pipeline', ['generate', '/nowhere'], /CONFIG_NOT_FOUND/],
    ['an unknown backend', ['generate', '--backend', 'abacus'], /BACKEND_UNKNOWN.*\n.*ort/],
    ['a backend that every object has', ['generate', '--backend', 'constructor'], /BACKEND_UNKNOWN/],
    ['steps without end', ['generate', '--steps', '5000000000'], /--steps.*at most 100000/],
    ['a seed that is none', ['generate', '--seed', '1.5'], /--seed.*integer/],
    ['a dtype that is none', ['generate', '--dtype', 'bf16'], /--dtype.*float32 or bfloat16/],
    ['a dtype of no model', ['generate', '--dtype', 'scheduler=float32'], /--dtype.*text-encoder/],
    ['a dtype with more behind it', ['generate', '--dtype', 'vae=float32=x'], /--dtype.*float32 or bfloat16/],
    ['two dtypes', ['generate', '--dtype', 'vae=float32', '--dtype', 'vae=bfloat16'], /--dtype.*twice for vae/],
    ['no steps', ['generate', '--steps', '0'], /--steps.*at least 1/],
    ['an unknown option', ['generate', '--sharpness', '3'], /unknown option '--sharpness'/],
  ])('refuses %s', async (_name, args, message) => {
    const { code, stderr } = await rankwise(...args)
    expect(code).toBe(1)
    expect(stderr).toMatch(message)
  })

  it.each([
    ['another format', 'a.jpg', 'OUTPUT_FORMAT'],
    ['a folder that is not there', join('missing', 'a.png'), 'OUTPUT_FOLDER'],
    ['a place that has a folder', 'taken.png', 'OUTPUT_FILE'],
    ['a file that is no folder', join('plain', 'a.png'), 'OUTPUT_FOLDER'],
    ['a name that is too long', `${'a'.repeat(240)}.png`, 'OUTPUT_FOLDER'],
  ])('refuses an output in %s before it loads anything', async (_name, out, code) => {
    await mkdir(join(folder, 'taken.png'), { recursive: true })
    await writeFile(join(folder, 'plain'), '')
    const result = await rankwise('generate', '--out', join(folder, out))
    expect(result).toMatchObject({ code: 1, stdout: '' })
    expect(result.stderr).toMatch(new RegExp(`^\\[${code}\\]`))
  })

  it.each([
    ['a folder that is not there', join('missing', 'trace.json'), 'OUTPUT_FOLDER'],
    ['a place that has a folder', '.', 'OUTPUT_FILE'],
    ['a file that is no folder', join('plain', 'trace.json'), 'OUTPUT_FOLDER'],
    ['what a link leads to, where there is no folder', 'dangling.json', 'OUTPUT_FOLDER'],
    ['a link that leads to itself', 'loop.json', 'OUTPUT_FILE'],
    ['the file of the picture', join('.', 'both.png'), 'OPTION_CONFLICT'],
  ])('refuses a trace in %s before it loads anything', async (_name, trace, code) => {
    await writeFile(join(folder, 'plain'), '')
    for (const [link, target] of [
      ['dangling.json', join('missing', 'trace.json')],
      ['loop.json', 'loop.json'],
    ] as const) {
      await symlink(target, join(folder, link)).catch(() => {})
    }
    const result = await rankwise('generate', '--out', join(folder, 'both.png'), '--trace', join(folder, trace))
    expect(result).toMatchObject({ code: 1, stdout: '' })
    expect(result.stderr).toMatch(new RegExp(`^\\[${code}\\]`))
  })

  it('refuses a trace that has no name', async () => {
    const result = await rankwise('generate', '--out', join(folder, 'none.png'), '--trace', '')
    expect(result).toMatchObject({ code: 1, stdout: '' })
    expect(result.stderr).toMatch(/^\[OUTPUT_FILE\]/)
  })

  it.runIf(existsSync('/proc/self'))('refuses a folder in which even root cannot write', async () => {
    const { stderr } = await rankwise('generate', '--out', join(folder, 'none.png'), '--trace', '/proc/trace.json')
    expect(stderr).toMatch(/^\[OUTPUT_FOLDER\] \/proc/)
    expect((await readdir(folder)).filter((name) => name.includes('none'))).toEqual([])
  })

  it.runIf(existsSync('/dev/full')).each(['1', '2'])(
    'says once which trace cannot be written, on %s ranks',
    async (tp) => {
      const out = join(folder, `untraced-${tp}.png`)
      const { code, stdout, stderr } = await rankwise(
        ...['generate', '--steps', '1', '--tp', tp, '--threads', '1', '--out', out, '--trace', '/dev/full'],
      )
      expect({ code, stdout }).toEqual({ code: 1, stdout: '' })
      expect(stderr).toMatch(/^\[TRACE_WRITE\] \/dev\/full.*\n {2}actual: reason ENOSPC$/m)
      expect(stderr.match(/^.*\[[A-Z_]+\]/gm)).toEqual(['[TRACE_WRITE]'])
      expect(stderr).not.toContain('    at ')
      // The picture is there by then.
      expect((await picture(out)).length).toBeGreaterThan(0)
    },
  )

  it('says once that the picture cannot be written, on two ranks', async () => {
    const out = join(folder, 'late.png')
    const command = startRankwise(
      ...['generate', '--steps', '300', '--tp', '2', '--threads', '1', '--out', out, '--profile'],
    )
    await command.stderrMatching(/step 1 /)
    await mkdir(out)
    const { code, stdout, stderr } = await command.result
    expect({ code, stdout }).toEqual({ code: 1, stdout: '' })
    expect(stderr).toMatch(/^\[IMAGE_WRITE\] .*late\.png.*\n {2}actual: reason EISDIR$/m)
    expect(stderr.match(/^.*\[[A-Z_]+\]/gm)).toEqual(['[IMAGE_WRITE]'])
    expect((await readdir(folder)).filter((name) => name.includes('late'))).toEqual(['late.png'])
  })

  it('draws with one pipeline, not with two', async () => {
    const { code, stderr } = await rankwise('generate', demoDirectory, '--synthetic', 'flux2-klein-4b')
    expect(code).toBe(1)
    expect(stderr).toMatch(/^\[OPTION_CONFLICT\]/)
  })

  it('prints its options', async () => {
    const { code, stdout } = await rankwise('generate', '--help')
    expect(code).toBe(0)
    expect(stdout).toContain('--seed <n>')
  })

  it('knows the demo by its path', async () => {
    const out = join(folder, 'demo-by-path.png')
    const { stderr } = await rankwise('generate', demoDirectory, '--threads', '1', '--out', out)
    expect(stderr).toContain('step 12 / 12')
  })

  it('ends as a shell expects when it is interrupted, and leaves no picture', async () => {
    const out = join(folder, 'interrupted.png')
    const command = startRankwise('generate', '--steps', '5000', '--tp', '2', '--threads', '1', '--out', out)
    await command.stderrMatching(/step 3 /)
    command.child.kill('SIGINT')
    expect((await command.result).code).toBe(130)
    expect((await readdir(folder)).filter((name) => name.includes('interrupted'))).toEqual([])
  })
})
