import { access, readFile } from 'node:fs/promises'
import { join } from 'node:path'
import { describe, expect, it } from 'vitest'
import { callOptions, directory, labels } from '../src/index.ts'

const golden = JSON.parse(await readFile(new URL('../golden/golden.json', import.meta.url), 'utf8'))

describe('the demo pipeline', () => {
  it('lies where the package says, with every component of its index', async () => {
    const { _class_name, _diffusers_version, is_distilled, ...components } = JSON.parse(
      await readFile(join(directory, 'model_index.json'), 'utf8'),
    )
    expect(_class_name).toBe('Flux2KleinPipeline')
    expect(is_distilled).toBe(false)
    expect(_diffusers_version).toBeTypeOf('string')
    for (const component of Object.keys(components)) await access(join(directory, component))
  })

  it('is called as it was when diffusers drew the goldens', () => {
    expect(callOptions).toEqual({
      height: golden.height,
      width: golden.width,
      numInferenceSteps: golden.num_inference_steps,
      guidanceScale: golden.guidance_scale,
      maxSequenceLength: golden.max_sequence_length,
    })
  })

  it('knows the objects and colours of its golden prompts', () => {
    expect(labels.objects).toHaveLength(72)
    expect(labels.colors).toHaveLength(10)
    for (const { prompt } of golden.runs) {
      expect(
        labels.objects.some((object) => prompt.includes(object)),
        prompt,
      ).toBe(true)
      expect(
        labels.colors.some((color) => prompt.includes(color)),
        prompt,
      ).toBe(true)
    }
  })
})
