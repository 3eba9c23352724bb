import { spawnSync } from 'node:child_process'
import { existsSync } from 'node:fs'
import { mkdtemp, readdir, readFile, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { readSafetensors, Tensor } from '@rankwise/core'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { inputsFile, makeFiles } from '../backends/block-files.ts'
import { type Engine, type EngineName, findEngine } from '../backends/engine.ts'
import { expectedResults, worstRelativeRms } from '../backends/expected.ts'
import { BLOCK_KINDS, type BlockCase, type BlockDType } from '../backends/job.ts'
import { measureBlock } from '../backends/measure.ts'
import { measureCase } from '../backends/measure-case.ts'
import { formatRatios, rowOf } from '../backends/row.ts'
import { kleinConfig } from '../klein-config.ts'

const main = fileURLToPath(new URL('../backends/main.ts', import.meta.url))
const never = new AbortController().signal

/** Small enough for the plain loops of the float64 reference. */
const CONFIG = {
  ...kleinConfig({ double: 1, single: 1 }),
  attention_head_dim: 16,
  axes_dims_rope: [4, 4, 4, 4],
  in_channels: 8,
  joint_attention_dim: 24,
  num_attention_heads: 4,
}
const CASES = BLOCK_KINDS.flatMap((block) => [1, 2].map((tp): BlockCase => ({ block, tokens: 36, tp })))

const native = await findEngine('tfjs-native', 'python3')
const torch = await findEngine('torch', 'python3')

/** What a result may be off: float32 sums of 192 products, and roundings to 8 bits. */
const MOST_RMS: Readonly<Record<BlockDType, number>> = { float32: 1e-6, bfloat16: 1e-2 }

let folder: string
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), 'rankwise-bench-'))
})
afterAll(() => rm(folder, { recursive: true }))

describe('rows', () => {
  const key = { backend: 'ort', dtype: 'float32', block: 'single', tokens: 768, tp: 1, threads: 1 } as const
  const round = (...milliseconds: number[]) => ({ milliseconds, relRms: milliseconds[0] as number, peakAnonBytes: 5 })

  it('take the median of all runs, and the worst error and memory of all rounds', () => {
    const rounds = [round(30, 10), { ...round(20), peakAnonBytes: 7 }]
    expect(rowOf({ ...key, ...({ signal: never } as object) }, rounds)).toEqual({
      ...key,
      milliseconds: 20,
      minMilliseconds: 10,
      maxMilliseconds: 30,
      relRms: 30,
      peakAnonBytes: 7,
    })
  })

  it('are compared with torch in the same dtype, on as many threads', () => {
    const row = (other: object, ...times: number[]) => rowOf({ ...key, ...other }, [round(...times)])
    const rows = [
      row({}, 2, 4, 8),
      row({ backend: 'tfjs-native', dtype: 'bfloat16' }, 5),
      row({ threads: 2 }, 1),
      row({ backend: 'torch' }, 6, 6, 6),
      row({ backend: 'torch', dtype: 'bfloat16' }, 10),
    ]
    expect(formatRatios(rows).map((line) => line.replaceAll(/ +/g, ' '))).toEqual([
      'single 768 tokens tp 1 1 thread float32 torch / ort 1.50x fastest 3.00x',
      'single 768 tokens tp 1 1 thread bfloat16 torch / tfjs-native 2.00x fastest 2.00x',
    ])
  })
})

describe('files', () => {
  it('are the same each time, and not those of another config', async () => {
    const folders = await Promise.all(['a', 'b'].map((name) => mkdtemp(join(folder, name))))
    const [first, second] = folders as [string, string]
    const blockCase = CASES[0] as BlockCase
    for (const own of folders) await makeFiles(own, CONFIG, blockCase)
    for (const name of ['config.json', 'single.safetensors', 'single-36.inputs.safetensors']) {
      expect(await readFile(join(first, name))).toEqual(await readFile(join(second, name)))
    }
    await expect(makeFiles(first, { ...CONFIG, mlp_ratio: 4 }, blockCase)).rejects.toThrow('is of another benchmark')
  })

  it('have inputs of mean 0 and deviation 1, in bfloat16', async () => {
    await makeFiles(folder, CONFIG, CASES[0] as BlockCase)
    const inputs = await readSafetensors(inputsFile(folder, CASES[0] as BlockCase))
    const { dtype, data } = inputs.get('hidden_states') as Tensor
    expect(dtype).toBe('bfloat16')
    const values = [...new Tensor('bfloat16', [data.length], data as Uint16Array).cast('float32').data]
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length
    const power = values.reduce((sum, value) => sum + value ** 2, 0) / values.length
    expect(Math.abs(mean)).toBeLessThan(0.1)
    expect(Math.abs(power - 1)).toBeLessThan(0.1)
  })
})

describe('blocks', () => {
  const timing = { warmUp: { seconds: 0, most: 1 }, timed: { seconds: 60, most: 2 } }
  const engineOf = async (name: EngineName): Promise<Engine> => {
    const found = await findEngine(name, 'python3')
    if ('missing' in found) throw new Error(found.missing)
    return found.engine
  }
  const rowsOf = async (name: EngineName, blockCase: BlockCase) => {
    await makeFiles(folder, CONFIG, blockCase)
    const expected = await expectedResults(folder, blockCase, undefined, never)
    const options = { dtypes: ['float32', 'bfloat16'] as const, threads: 1, repeat: 1, folder, temporary: folder }
    return measureCase(blockCase, { ...options, engines: [await engineOf(name)], expected, signal: never, timing })
  }
  const expectRows = async (name: EngineName, blockCase: BlockCase) => {
    const rows = await rowsOf(name, blockCase)
    expect(rows.map(({ dtype }) => dtype)).toEqual((await engineOf(name)).dtypes)
    for (const row of rows) {
      expect(row).toMatchObject({ ...blockCase, backend: name, threads: 1 })
      expect(row.relRms).toBeLessThan(MOST_RMS[row.dtype])
      expect(row.milliseconds).toBeGreaterThan(0)
      expect(row.peakAnonBytes).toBeGreaterThan(10e6)
    }
  }

  it.each(CASES)('$block at tp $tp: ort computes what float64 does', (blockCase) => expectRows('ort', blockCase))

  it('wasm computes what float64 does', () => expectRows('tfjs-wasm', CASES[3] as BlockCase))

  it.skipIf('missing' in native)('tfjs native (needs its addon) does so in both dtypes', () =>
    expectRows('tfjs-native', CASES[3] as BlockCase),
  )

  // A process imports torch, which takes long on busy cores.
  describe.skipIf('missing' in torch)('torch (needs python3 with diffusers)', { timeout: 120_000 }, () => {
    it.each([CASES[1], CASES[3]] as BlockCase[])('computes $block at tp $tp as core does', async (blockCase) => {
      await expectRows('torch', blockCase)
      const own = await mkdtemp(join(folder, 'torch-'))
      await makeFiles(own, CONFIG, blockCase)
      const results = await expectedResults(own, blockCase, await engineOf('torch'), never)
      const ofCore = await expectedResults(folder, blockCase, undefined, never)
      // Which core rounds to float32 at the end.
      expect(worstRelativeRms(results, ofCore)).toBeLessThan(1e-7)
    })
  })

  it('are another one for each share', async () => {
    const [whole, half] = await Promise.all(
      CASES.slice(0, 2).map(async (blockCase) => {
        await makeFiles(folder, CONFIG, blockCase)
        return expectedResults(folder, blockCase, undefined, never)
      }),
    )
    expect(worstRelativeRms(whole as never, half as never)).toBeGreaterThan(0.1)
  })

  it('are not given out in float64 before they are complete', async () => {
    const own = await mkdtemp(join(folder, 'incomplete-'))
    const broken: Engine = {
      name: 'torch',
      dtypes: [],
      command: ({ output }) => ({
        file: process.execPath,
        args: ['-e', `require('fs').writeFileSync(${JSON.stringify(output)}, ''); throw new Error('half done')`],
      }),
    }
    await expect(expectedResults(own, CASES[0] as BlockCase, broken, never)).rejects.toThrow('half done')
    expect(await readdir(own)).toEqual([])
  })

  it('are on one thread alone in WebAssembly', async () => {
    const wasm = await engineOf('tfjs-wasm')
    const options = { dtypes: ['float32'] as const, threads: 2, repeat: 1, folder, temporary: folder, signal: never }
    expect(await measureCase(CASES[0] as BlockCase, { ...options, engines: [wasm], expected: new Map() })).toEqual([])
  })
})

describe('a measured process', () => {
  const node = (script: string) => ({
    file: process.execPath,
    args: ['-e', `const { writeSync } = require('fs');${script}`],
  })
  const HELD_BYTES = 200e6

  it('is watched until it is warm, and then timed', async () => {
    const warm = `global.held = Buffer.alloc(${HELD_BYTES}, 1); setTimeout(() => writeSync(3, 'warm\\n'), 200)`
    const timed = `process.stdin.once('data', () => { writeSync(3, '[3,4]\\n'); process.exit() })`
    const measured = await measureBlock(node(`${warm}; ${timed}`), never)
    expect(measured.milliseconds).toEqual([3, 4])
    expect(measured.peakAnonBytes).toBeGreaterThan(HELD_BYTES)
  })

  it.each([
    ['before it is warm', '', /node ended with 1\n[\s\S]*no such op/],
    ['after it is warm', `writeSync(3, 'warm\\n');`, /node ended with 1\n[\s\S]*no such op/],
  ])('that fails %s says what it printed', async (_, first, message) => {
    await expect(measureBlock(node(`${first} throw new Error('no such op')`), never)).rejects.toThrow(message)
  })

  it('that reports nothing is an error', async () => {
    await expect(measureBlock(node(''), never)).rejects.toThrow('without a report')
  })

  it('that does not exist is named', async () => {
    await expect(measureBlock({ file: '/nonexistent/python', args: [] }, never)).rejects.toThrow('ENOENT')
  })

  it('is stopped when the user stops', async () => {
    const stop = AbortSignal.timeout(300)
    await expect(measureBlock(node('setInterval(() => {}, 1000)'), stop)).rejects.toThrow('aborted due to timeout')
  })
})

describe('bench:backends', () => {
  const run = (args: readonly string[]) =>
    spawnSync(process.execPath, ['--import', 'tsx', '--conditions=@rankwise/source', main, ...args], {
      encoding: 'utf8',
    })

  it.each([
    ['--python', 'false', '--python: false has no diffusers with FLUX.2'],
    ['--python', '/nonexistent/python', '--python: /nonexistent/python does not start'],
  ])('ends with 2 before it writes weights for %s %s', (option, value, message) => {
    const directory = join(folder, 'none')
    const { status, stderr } = run(['--backends', 'ort,torch', option, value, '--directory', directory])
    expect(stderr).toContain(message)
    expect(status).toBe(2)
    expect(existsSync(directory)).toBe(false)
  })

  it.each([
    ['--backends', 'ort,cuda'],
    ['--blocks', 'triple'],
    ['--tokens', '800'],
    ['--tp', '5'],
    ['--threads', '0'],
    ['--dtypes', 'float16'],
    ['--repeat', 'x'],
  ])('refuses %s %s', (option, value) => {
    const { status, stderr } = run([option, value])
    expect(stderr).toContain(option)
    expect(status).toBe(1)
  })
})
