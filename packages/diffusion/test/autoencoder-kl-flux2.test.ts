import { readFile } from 'node:fs/promises'
import { fileURLToPath } from 'node:url'
import { ort } from '@rankwise/backend-ort'
import {
  type Backend,
  Checkpoint,
  type Module,
  readConfig,
  readSafetensors,
  Tensor,
  type TracedTensor,
} from '@rankwise/core'
import { expectClose, referencePath, relativeRms } from '@rankwise/fixtures'
import { describe, expect, it } from 'vitest'
import { AutoencoderKLFlux2 } from '../src/autoencoder-kl-flux2.ts'
import { Image } from '../src/image.ts'
import { postprocess } from '../src/image-processor.ts'
import { denormalizeLatents, unpackLatents, unpatchifyLatents } from '../src/latents.ts'
import { MutantBackend, type Mutation, withAttributes } from './mutant-backend.ts'
import { codeOf, goldenTensors } from './support.ts'

/** float32 kernels come to 2e-6; from 1.6e-5 on an epsilon of 1e-5 in the group norms would pass. */
const TOLERANCE = { relativeRms: 5e-6 }

const PIPELINES = ['flux2-tiny', 'flux2-klein-tiny']
const DEMO = fileURLToPath(new URL('../../demo-flux2', import.meta.url))
const FOLDERS = [...PIPELINES.map((name) => referencePath(name, 'vae')), `${DEMO}/pipeline/vae`]

/** An autoencoder that also returns what its submodules give. */
class TappedAutoencoder extends AutoencoderKLFlux2 {
  static override fromConfig(config: unknown): TappedAutoencoder {
    return new TappedAutoencoder(AutoencoderKLFlux2.fromConfig(config).config)
  }

  /** Outputs of the modules at `paths`, while latents are decoded. */
  tapDecode(z: Tensor, paths: Readonly<Record<string, string>>): Promise<Record<string, Tensor>> {
    return this.#tap('z', z, paths, (x) => this.decoder.call(this.post_quant_conv?.call(x) as TracedTensor))
  }

  /** Outputs of the modules at `paths`, while an image is encoded. */
  tapEncode(sample: Tensor, paths: Readonly<Record<string, string>>): Promise<Record<string, Tensor>> {
    return this.#tap('sample', sample, paths, (x) => this.quant_conv?.call(this.encoder.call(x)))
  }

  #tap(
    name: string,
    input: Tensor,
    paths: Readonly<Record<string, string>>,
    forward: (x: TracedTensor) => unknown,
  ): Promise<Record<string, Tensor>> {
    return this.execute(`tap ${name}`, { [name]: input }, (inputs) => {
      const taps: Record<string, TracedTensor> = {}
      for (const [golden, path] of Object.entries(paths)) {
        record(this.getSubmodule(path), (output) => {
          taps[golden] = output
        })
      }
      forward(inputs[name] as TracedTensor)
      return taps
    })
  }
}

function record(module: Module, onOutput: (output: TracedTensor) => void): void {
  const call = module.call.bind(module)
  module.call = (...args) => {
    const output = call(...args)
    onOutput(output as TracedTensor)
    return output
  }
}

const load = (name: string, backend: Backend) =>
  AutoencoderKLFlux2.fromPretrained(referencePath(name), { subfolder: 'vae', backend })

describe.each(PIPELINES)('%s', (name) => {
  it('decodes latents', async () => {
    const golden = await goldenTensors('vae', `${name}.safetensors`)
    await using backend = await ort({ device: 'cpu' })
    await using vae = await load(name, backend)
    expectClose(await vae.decode(golden('dec.unpatchified')), golden('dec.image'), TOLERANCE)
  })

  it('encodes an image to the mode', async () => {
    const golden = await goldenTensors('vae', `${name}.safetensors`)
    await using backend = await ort({ device: 'cpu' })
    await using vae = await load(name, backend)
    expectClose(await vae.encode(golden('enc.preprocessed')), golden('enc.mode'), TOLERANCE)
  })

  it('gives the statistics of the latents', async () => {
    const golden = await goldenTensors('vae', `${name}.safetensors`)
    await using backend = await ort({ device: 'cpu' })
    await using vae = await load(name, backend)
    const { mean, std } = await vae.latentStatistics()
    expect(mean).toEqual(golden('bn.mean'))
    // One unit in the last place: torch's vectorised root is not always correctly rounded.
    expectClose(std, golden('bn.std'), { relative: 2 ** -23 })
  })

  it('has the scale factor of its blocks', async () => {
    await using backend = await ort({ device: 'cpu' })
    await using vae = await load(name, backend)
    expect(vae.vaeScaleFactor).toBe(8)
    expect(vae.config.latentChannels).toBe(32)
  })
})

describe('submodules of flux2-tiny', () => {
  const loadTapped = (backend: Backend) =>
    TappedAutoencoder.fromPretrained(referencePath('flux2-tiny'), { subfolder: 'vae', backend })

  it('compute what those of diffusers compute when they decode', async () => {
    const golden = await goldenTensors('vae', 'flux2-tiny.safetensors')
    await using backend = await ort({ device: 'cpu' })
    await using vae = await loadTapped(backend)
    const taps = await vae.tapDecode(golden('dec.unpatchified'), {
      'dec.post_quant_conv': 'post_quant_conv',
      'dec.conv_in': 'decoder.conv_in',
      'dec.mid.resnet0': 'decoder.mid_block.resnets.0',
      'dec.mid.attn': 'decoder.mid_block.attentions.0',
      'dec.mid': 'decoder.mid_block',
      'dec.up0.upsampler': 'decoder.up_blocks.0.upsamplers.0',
      'dec.up0': 'decoder.up_blocks.0',
      'dec.up1': 'decoder.up_blocks.1',
      'dec.up2': 'decoder.up_blocks.2',
      'dec.up3': 'decoder.up_blocks.3',
      'dec.norm_out': 'decoder.conv_norm_out',
    })
    for (const [name, tap] of Object.entries(taps)) expectClose(tap, golden(name), TOLERANCE)
    expect(Object.keys(taps)).toHaveLength(11)
  })

  it('compute what those of diffusers compute when they encode', async () => {
    const golden = await goldenTensors('vae', 'flux2-tiny.safetensors')
    await using backend = await ort({ device: 'cpu' })
    await using vae = await loadTapped(backend)
    const taps = await vae.tapEncode(golden('enc.preprocessed'), {
      'enc.conv_in': 'encoder.conv_in',
      'enc.down0.downsampler': 'encoder.down_blocks.0.downsamplers.0',
      'enc.down0': 'encoder.down_blocks.0',
      'enc.down1': 'encoder.down_blocks.1',
      'enc.down2': 'encoder.down_blocks.2',
      'enc.down3': 'encoder.down_blocks.3',
      'enc.mid': 'encoder.mid_block',
      'enc.conv_out': 'encoder.conv_out',
      'enc.moments': 'quant_conv',
    })
    for (const [name, tap] of Object.entries(taps)) expectClose(tap, golden(name), TOLERANCE)
    expect(Object.keys(taps)).toHaveLength(9)
  })
})

describe('the demo pipeline', () => {
  it('decodes to the picture that diffusers drew', async () => {
    const latents = (await readSafetensors(`${DEMO}/golden/cat-blue.safetensors`)).get('latents.12')
    const expected = Image.fromPng(await readFile(`${DEMO}/golden/cat-blue.png`))
    await using backend = await ort({ device: 'cpu' })
    await using vae = await AutoencoderKLFlux2.fromPretrained(`${DEMO}/pipeline`, { subfolder: 'vae', backend })
    const unpacked = unpackLatents((latents as Tensor).cast('float32'), 8, 8)
    const z = unpatchifyLatents(denormalizeLatents(unpacked, await vae.latentStatistics()))
    const [image] = postprocess((await vae.decode(z)) as Tensor<'float32'>)
    const differences = (image as Image).data.map((value, i) => Math.abs(value - (expected.data[i] as number)))
    expect(Math.max(...differences)).toBeLessThanOrEqual(1)
    expect(differences.filter((difference) => difference > 0).length).toBeLessThanOrEqual(expected.data.length / 1000)
  })
})

describe('a wrong computation is noticed', () => {
  const swapKernelSides: Mutation = {
    weight: (weight) =>
      weight.shape.length === 4 && (weight.shape[2] as number) > 1 ? transposeKernels(weight) : weight,
  }
  const decodeMutants: Record<string, Mutation> = {
    'epsilon of group norms': withAttributes('group_norm', { eps: 1e-5 }),
    'groups of group norms': withAttributes('group_norm', { groups: 2 }),
    'scale of the attention': withAttributes('attention', { scale: 1 }),
    'transposed kernels': swapKernelSides,
    'no activation': {
      node: (node) => (node.op === 'silu' ? { ...node, op: 'mul_scalar', attributes: { value: 1 } } : node),
    },
  }
  const encodeMutants: Record<string, Mutation> = {
    'epsilon of group norms': withAttributes('group_norm', { eps: 1e-5 }),
    'padding at the other sides': {
      node: (node) =>
        node.attributes.stride === 2 ? { ...node, attributes: { ...node.attributes, padding: [1, 0, 1, 0] } } : node,
    },
    'transposed kernels': swapKernelSides,
  }

  it.each(Object.entries(decodeMutants))('when decoding: %s', async (_name, mutation) => {
    const golden = await goldenTensors('vae', 'flux2-tiny.safetensors')
    await using vae = await load('flux2-tiny', new MutantBackend(mutation))
    const difference = relativeRms(await vae.decode(golden('dec.unpatchified')), golden('dec.image'))
    expect(difference).toBeGreaterThan(TOLERANCE.relativeRms)
  })

  it.each(Object.entries(encodeMutants))('when encoding: %s', async (_name, mutation) => {
    const golden = await goldenTensors('vae', 'flux2-tiny.safetensors')
    await using vae = await load('flux2-tiny', new MutantBackend(mutation))
    const difference = relativeRms(await vae.encode(golden('enc.preprocessed')), golden('enc.mode'))
    expect(difference).toBeGreaterThan(TOLERANCE.relativeRms)
  })
})

/** Swaps height and width of `[out, in, height, width]`. */
function transposeKernels(weight: Tensor): Tensor {
  const side = weight.shape[3] as number
  const result = weight.clone()
  for (let i = 0; i < weight.data.length; i++) {
    const [kernel, y, x] = [i - (i % (side * side)), Math.floor(i / side) % side, i % side]
    result.data[kernel + x * side + y] = weight.data[i] as number
  }
  return result
}

describe('weights', () => {
  it.each(FOLDERS)('have the names and shapes of the checkpoint: %s', async (folder) => {
    const vae = AutoencoderKLFlux2.fromConfig(await readConfig(folder))
    await using checkpoint = await Checkpoint.open(folder)
    const stored = [...checkpoint.tensors]
      .filter(([name]) => !isIgnored(name))
      .map(([name, { shape }]) => [name, shape])
    expect(shapesOf(vae)).toEqual(Object.fromEntries(stored))
    expect([...checkpoint.tensors.keys()].filter(isIgnored)).toEqual(['bn.num_batches_tracked'])
  })

  const isIgnored = (name: string) => AutoencoderKLFlux2.ignoredWeights.some((pattern) => pattern.test(name))
})

function shapesOf(model: Module): Record<string, readonly number[]> {
  return Object.fromEntries([...model.namedParameters()].map(([name, { shape }]) => [name, shape]))
}

describe('config', () => {
  it('defaults to the real autoencoder', () => {
    const vae = AutoencoderKLFlux2.fromConfig({ _class_name: 'AutoencoderKLFlux2' })
    expect(vae.config).toMatchObject({ latentChannels: 32, normNumGroups: 32, batchNormEps: 1e-4 })
    expect(shapesOf(vae)).toMatchObject({
      'encoder.conv_out.weight': [64, 512, 3, 3],
      'decoder.up_blocks.3.resnets.0.conv_shortcut.weight': [128, 256, 1, 1],
      'decoder.mid_block.attentions.0.to_q.weight': [512, 512],
      'bn.running_var': [128],
    })
  })

  it('may give the decoder channels of its own', () => {
    const vae = AutoencoderKLFlux2.fromConfig({ decoder_block_out_channels: [96, 192, 384, 384] })
    expect(shapesOf(vae)).toMatchObject({
      'encoder.conv_in.weight': [128, 3, 3, 3],
      'decoder.conv_in.weight': [384, 32, 3, 3],
      'decoder.conv_out.weight': [3, 96, 3, 3],
    })
  })

  it('may leave out attention and 1x1 convolutions', () => {
    const names = Object.keys(
      shapesOf(
        AutoencoderKLFlux2.fromConfig({
          mid_block_add_attention: false,
          use_quant_conv: false,
          use_post_quant_conv: false,
        }),
      ),
    )
    expect(names.filter((name) => /attentions|quant_conv/.test(name))).toEqual([])
  })

  it.each([
    [{ _class_name: 'AutoencoderKL' }],
    [{ act_fn: 'gelu' }],
    [
      {
        down_block_types: ['DownEncoderBlock2D', 'AttnDownEncoderBlock2D', 'DownEncoderBlock2D', 'DownEncoderBlock2D'],
      },
    ],
    [{ up_block_types: ['UpDecoderBlock2D', 'UpDecoderBlock2D', 'UpDecoderBlock2D', 'AttnUpDecoderBlock2D'] }],
    [{ patch_size: [1, 1] }],
  ])('that is not implemented is refused: %j', async (config) => {
    expect(await codeOf(() => AutoencoderKLFlux2.fromConfig(config))).toBe('CONFIG_UNSUPPORTED')
  })

  it.each([
    ['a list'],
    [{ latent_channels: '32' }],
    [{ block_out_channels: [] }],
    [{ norm_num_groups: 48 }],
    [{ block_out_channels: [128, 256] }],
    [{ decoder_block_out_channels: [96, 192] }],
    [{ decoder_block_out_channels: [100, 100, 100, 100] }],
  ])('that is wrong is refused: %j', async (config) => {
    expect(await codeOf(() => AutoencoderKLFlux2.fromConfig(config))).toBe('CONFIG_INVALID')
  })
})

describe('arguments', () => {
  it('of another shape are refused', async () => {
    await using backend = await ort({ device: 'cpu' })
    await using vae = await load('flux2-tiny', backend)
    const zeros = (...shape: number[]) => Tensor.zeros('float32', shape)
    expect(await codeOf(() => vae.decode(zeros(1, 128, 2, 2)))).toBe('LATENTS_SHAPE')
    expect(await codeOf(() => vae.decode(zeros(32, 2, 2)))).toBe('LATENTS_SHAPE')
    expect(await codeOf(() => vae.encode(zeros(1, 4, 16, 16)))).toBe('IMAGE_SHAPE')
  })

  it('may come in another dtype', async () => {
    const golden = await goldenTensors('vae', 'flux2-tiny.safetensors')
    const latents = golden('dec.unpatchified').cast('bfloat16')
    await using backend = await ort({ device: 'cpu' })
    await using vae = await load('flux2-tiny', backend)
    expect(await vae.decode(latents)).toEqual(await vae.decode(latents.cast('float32')))
  })

  it('may have a batch', async () => {
    const golden = await goldenTensors('vae', 'flux2-tiny.safetensors')
    const latents = golden('dec.unpatchified').data as Float32Array
    await using backend = await ort({ device: 'cpu' })
    await using vae = await load('flux2-tiny', backend)
    const images = await vae.decode(Tensor.float32([2, 32, 4, 6], [...latents.map((value) => -value), ...latents]))
    expect(images.shape).toEqual([2, 3, 32, 48])
    const second = (images.data as Float32Array).subarray(images.data.length / 2)
    expectClose(second, golden('dec.image').reshape([second.length]), TOLERANCE)
  })

  it('an aborted signal stops', async () => {
    await using backend = await ort({ device: 'cpu' })
    await using vae = await load('flux2-tiny', backend)
    const signal = AbortSignal.abort()
    expect(await codeOf(() => vae.decode(Tensor.zeros('float32', [1, 32, 2, 2]), { signal }))).toBe('ABORTED')
  })

  it('a model without weights says so', async () => {
    const vae = AutoencoderKLFlux2.fromConfig({})
    expect(await codeOf(() => vae.decode(Tensor.zeros('float32', [1, 32, 2, 2])))).toBe('MODEL_NOT_LOADED')
  })
})
