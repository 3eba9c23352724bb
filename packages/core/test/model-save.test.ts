import { mkdtemp, readdir, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { Linear, ModuleList, readSafetensors, Tensor, TensorParallelConfig, writeSafetensors } from '../src/index.ts'
import { ReferenceBackend } from '../src/reference/index.ts'
import { Mlp, mlpWeights } from './mlp-model.ts'

const backend = new ReferenceBackend()
const x = Tensor.float32([2, 4], [1, 2, 3, 4, -1, 0.5, 0, 2])
// Written as Python writes it: parsing would lose the fraction.
const CONFIG = '{"_class_name": "Mlp", "ratio": 3.0}\n'

let root: string
let original: string

beforeEach(async () => {
  root = await mkdtemp(join(tmpdir(), 'rankwise-model-save-'))
  original = await mkdtemp(join(root, 'original-'))
  await writeFile(join(original, 'config.json'), CONFIG)
  await writeSafetensors(join(original, 'diffusion_pytorch_model.safetensors'), mlpWeights())
})
afterEach(() => rm(root, { recursive: true }))

/** Its layers have one weight, which checkpoints have under the name of the first. */
class TiedMlp extends Mlp {
  static readonly tiedWeights = { 'layers.1.weight': 'layers.0.weight' }
  override readonly layers = new ModuleList([new Linear(4, 4), new Linear(4, 4)])

  static override fromConfig(): TiedMlp {
    return new TiedMlp()
  }
}

describe('savePretrained', () => {
  it('writes tied weights under both names, split or not', async () => {
    const bias = Tensor.float32([4], [1, 2, 3, 4])
    const weight = Tensor.float32([4, 4], Array.from({ length: 16 }, Math.sin))
    const stored = { 'layers.0.weight': weight, 'layers.0.bias': bias, 'layers.1.bias': bias }
    await writeSafetensors(join(original, 'diffusion_pytorch_model.safetensors'), new Map(Object.entries(stored)))
    const model = await TiedMlp.fromPretrained(original, { backend })
    await model.savePretrained(join(root, 'saved'))
    const saved = await readSafetensors(join(root, 'saved', 'diffusion_pytorch_model.safetensors'))
    expect(saved).toEqual(new Map(Object.entries({ ...stored, 'layers.1.weight': weight })))
    const whole = await model.run(x)
    await model.enableParallelism(new TensorParallelConfig({ tpDegree: 1 }))
    expect(await model.run(x)).toEqual(whole)
  })

  it.each([
    ['one file', undefined, ['config.json', 'diffusion_pytorch_model.safetensors']],
    [
      'files of at most 200 bytes',
      200,
      [
        'config.json',
        'diffusion_pytorch_model-00001-of-00002.safetensors',
        'diffusion_pytorch_model-00002-of-00002.safetensors',
        'diffusion_pytorch_model.safetensors.index.json',
      ],
    ],
  ])('writes %s that load again', async (_name, maxShardSize, files) => {
    const folder = join(root, 'saved')
    const model = await Mlp.fromPretrained(original, { backend })
    await model.savePretrained(folder, maxShardSize === undefined ? {} : { maxShardSize })
    expect((await readdir(folder)).sort()).toEqual(files)
    const again = await Mlp.fromPretrained(folder, { backend })
    expect(await again.run(x)).toEqual(await model.run(x))
  })

  it('writes what it read', async () => {
    const folder = join(root, 'saved')
    await (await Mlp.fromPretrained(original, { backend })).savePretrained(folder)
    const saved = await readSafetensors(join(folder, 'diffusion_pytorch_model.safetensors'))
    expect(new Map([...saved].sort())).toEqual(new Map([...mlpWeights()].sort()))
  })

  it('is refused once the model is split, whichever way', async () => {
    const parallelConfig = new TensorParallelConfig({ tpDegree: 1 })
    const loaded = await Mlp.fromPretrained(original, { backend, parallelConfig })
    await expect(loaded.savePretrained(join(root, 'a'))).rejects.toMatchObject({ code: 'SAVE_PARALLEL' })
    const split = await Mlp.fromPretrained(original, { backend })
    await split.enableParallelism(parallelConfig)
    await expect(split.savePretrained(join(root, 'b'))).rejects.toMatchObject({ code: 'SAVE_PARALLEL' })
    expect(await readdir(root)).toEqual([expect.stringMatching(/^original/)])
  })
})

describe('saveShards', () => {
  it('writes slices and a manifest that fromPretrained loads', async () => {
    const folder = join(root, 'shards')
    const model = await Mlp.fromPretrained(original, {
      backend,
      parallelConfig: new TensorParallelConfig({ tpDegree: 1 }),
    })
    await model.saveShards(folder)
    expect((await readdir(folder)).sort()).toEqual([
      'config.json',
      'diffusion_pytorch_model.rank-00000-of-00001.safetensors',
      'diffusion_pytorch_model.shards.json',
    ])
    const again = await Mlp.fromPretrained(folder, { backend })
    expect(await again.run(x)).toEqual(await model.run(x))
  })
})
