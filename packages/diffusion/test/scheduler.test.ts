import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { castData, Tensor } from '@rankwise/core'
import { referencePath } from '@rankwise/fixtures'
import fc from 'fast-check'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { camelizeConfig } from '../src/config.ts'
import { Generator } from '../src/generator.ts'
import { linspace } from '../src/linspace.ts'
import { type LatentDType, roundingOf } from '../src/rounding.ts'
import {
  computeEmpiricalMu,
  FlowMatchEulerDiscreteScheduler,
  modelTimestep,
  type SetTimestepsOptions,
} from '../src/scheduler.ts'
import { codeOf, differingElements, goldenJson, goldenTensors, ownGoldenJson } from './support.ts'

interface ScheduleCase {
  readonly image_seq_len: number
  readonly num_inference_steps: number
  readonly mu: number
  readonly sigmas: number[]
  readonly timesteps: number[]
  readonly model_t_f32: number[] | null
  readonly model_t_bf16: number[] | null
}

interface OptionCase {
  readonly config: Record<string, unknown>
  readonly args: Record<string, unknown>
  readonly sigmas: number[]
  readonly timesteps: number[]
}

type StepSamples = Record<LatentDType, { stochastic: number[]; euler: number[] }>

const load = () =>
  FlowMatchEulerDiscreteScheduler.fromPretrained(referencePath('flux2-klein-tiny'), { subfolder: 'scheduler' })

const flux2Schedule = (imageSeqLen: number, steps: number): SetTimestepsOptions => ({
  sigmas: linspace(1, 1 / steps, steps),
  mu: computeEmpiricalMu(imageSeqLen, steps),
})

let scheduler: FlowMatchEulerDiscreteScheduler
beforeAll(async () => {
  scheduler = await load()
})

describe('the schedules of FLUX.2', () => {
  let cases: ScheduleCase[]
  beforeAll(async () => {
    ;({ cases } = await goldenJson<{ cases: ScheduleCase[] }>('scheduler', 'schedules.json'))
  })

  it('are bit-exact in all 81 cases', () => {
    expect(cases).toHaveLength(81)
    for (const expected of cases) {
      const { image_seq_len: tokens, num_inference_steps: steps } = expected
      expect(computeEmpiricalMu(tokens, steps)).toBe(expected.mu)
      scheduler.setTimesteps(flux2Schedule(tokens, steps))
      expect([...scheduler.sigmas], `${tokens} tokens, ${steps} steps`).toEqual(expected.sigmas)
      expect([...scheduler.timesteps], `${tokens} tokens, ${steps} steps`).toEqual(expected.timesteps)
    }
  })

  it.each([
    ['float32', 'model_t_f32'],
    ['bfloat16', 'model_t_bf16'],
  ] as const)('reach the transformer with the roundings of %s', (dtype, key) => {
    const round = roundingOf(dtype)
    const checked = cases.filter((expected) => expected[key] !== null)
    for (const expected of checked) {
      const times = expected.timesteps.map((timestep) => round(modelTimestep(timestep, dtype) * 1000))
      expect(times).toEqual(expected[key])
    }
    expect(checked).toHaveLength(72)
  })

  it('can fail: sigmas computed in float64 differ', () => {
    const inFloat64 = cases.filter(({ mu, num_inference_steps: steps, sigmas }) => {
      const e = Math.exp(mu)
      return linspace(1, 1 / steps, steps).every((s, i) => Math.fround(e / (e + 1 / s - 1)) === sigmas[i])
    })
    expect(inFloat64.length).toBeLessThan(40)
  })
})

describe('the options of the schedule', () => {
  it('give what diffusers gives', async () => {
    const { cases } = await ownGoldenJson<{ cases: OptionCase[] }>('schedule-options.json')
    for (const { config, args, sigmas, timesteps } of cases) {
      const optioned = new FlowMatchEulerDiscreteScheduler(camelizeConfig(config))
      optioned.setTimesteps(camelizeConfig(args))
      expect([...optioned.sigmas], JSON.stringify({ config, args })).toEqual(sigmas)
      expect([...optioned.timesteps], JSON.stringify({ config, args })).toEqual(timesteps)
    }
    expect(cases).toHaveLength(29)
  })

  it('are read from the file, defaults included', () => {
    expect(scheduler.config).toMatchObject({
      numTrainTimesteps: 1000,
      shift: 3,
      useDynamicShifting: true,
      maxShift: 1.15,
    })
    expect(new FlowMatchEulerDiscreteScheduler().config).toMatchObject({ shift: 1, useDynamicShifting: false })
  })

  it.each([
    ['beta sigmas', { use_beta_sigmas: true }, 'SCHEDULER_UNSUPPORTED'],
    ['an option of a later version', { use_new_sigmas: 'yes' }, 'SCHEDULER_UNSUPPORTED'],
    ['two respacings', { use_karras_sigmas: true, use_exponential_sigmas: true }, 'SCHEDULER_UNSUPPORTED'],
    ['another class', { _class_name: 'EulerDiscreteScheduler' }, 'SCHEDULER_UNSUPPORTED'],
    ['an unknown time shift', { time_shift_type: 'cubic' }, 'CONFIG_INVALID'],
    ['a shift that is no number', { shift: '3' }, 'CONFIG_INVALID'],
    ['no object', [], 'CONFIG_INVALID'],
  ])('refuses %s', async (_, file, code) => {
    expect(await fromFile(JSON.stringify(file))).toBe(code)
  })

  it('lets pass unknown options that are off', async () => {
    expect(await fromFile('{"use_beta_sigmas": false, "use_new_sigmas": null}')).toBe('no error')
  })

  it('refuses a missing file and one that is not JSON', async () => {
    expect(await fromFile('{')).toBe('CONFIG_INVALID')
    const missing = () => FlowMatchEulerDiscreteScheduler.fromPretrained(referencePath('flux2-klein-tiny'))
    expect(await codeOf(missing)).toBe('CONFIG_NOT_FOUND')
  })

  const folders: string[] = []
  async function fromFile(text: string): Promise<string> {
    const folder = await mkdtemp(join(tmpdir(), 'rankwise-scheduler-'))
    folders.push(folder)
    await writeFile(join(folder, 'scheduler_config.json'), text)
    return codeOf(() => FlowMatchEulerDiscreteScheduler.fromPretrained(folder))
  }
  afterAll(() => Promise.all(folders.map((folder) => rm(folder, { recursive: true }))))
})

describe('setTimesteps', () => {
  it.each([
    ['no mu with dynamic shifting', { numInferenceSteps: 4 }],
    ['a mu that is no number', { numInferenceSteps: 4, mu: Number.NaN }],
    ['an overflowing mu', { numInferenceSteps: 4, mu: 1000 }],
    ['neither steps nor sigmas', { mu: 1 }],
    ['no steps', { numInferenceSteps: 0, mu: 1 }],
    ['a fraction of a step', { numInferenceSteps: 2.5, mu: 1 }],
    ['no sigmas', { sigmas: [], mu: 1 }],
    ['steps and sigmas that disagree', { numInferenceSteps: 3, sigmas: [1, 0.5], mu: 1 }],
    ['a sigma that is no number', { sigmas: [1, Number.NaN], mu: 1 }],
  ])('refuses %s', async (_, options) => {
    expect(await codeOf(() => scheduler.setTimesteps(options))).toBe('SCHEDULER_SIGMAS')
  })

  it('refuses a terminal sigma for the single step at sigma 1, which cannot be stretched', async () => {
    const stretched = new FlowMatchEulerDiscreteScheduler({ shiftTerminal: 0.1 })
    expect(await codeOf(() => stretched.setTimesteps({ sigmas: [1] }))).toBe('SCHEDULER_SIGMAS')
  })

  it('descends from 1 to 0 for every size and number of steps', () => {
    fc.assert(
      fc.property(fc.integer({ min: 1, max: 20000 }), fc.integer({ min: 1, max: 100 }), (tokens, steps) => {
        scheduler.setTimesteps(flux2Schedule(tokens, steps))
        const { sigmas } = scheduler
        return (
          sigmas.length === steps + 1 && sigmas[0] === 1 && sigmas.every((s, i) => i === 0 || s < (sigmas[i - 1] ?? 0))
        )
      }),
    )
  })
})

describe('step', () => {
  let golden: Awaited<ReturnType<typeof goldenTensors>>
  beforeAll(async () => {
    golden = await goldenTensors('scheduler', 'step.safetensors')
  })
  const latents = (name: string) => golden(name) as Tensor<LatentDType>

  it.each(['f32', 'bf16'])('is bit-exact over a whole run in %s', (dtype) => {
    scheduler.setTimesteps(flux2Schedule(64, 4))
    let sample = latents(`${dtype}.sample0`)
    for (const [i, timestep] of scheduler.timesteps.entries()) {
      expect(scheduler.stepIndex).toBe(i === 0 ? undefined : i)
      sample = scheduler.step(latents(`${dtype}.model_output${i}`), timestep, sample)
      const expected = golden(`${dtype}.sample${i + 1}`)
      expect([sample.dtype, sample.shape]).toEqual([expected.dtype, expected.shape])
      expect(differingElements(sample.data, expected.data), `step ${i}`).toBe(0)
    }
  })

  it('can fail: without the rounding of dt, or with another step, bfloat16 differs', () => {
    scheduler.setTimesteps(flux2Schedule(64, 4))
    const [from, to] = scheduler.sigmas
    const dt = Math.fround((to as number) - (from as number))
    const round = roundingOf('bfloat16')
    const velocity = latents('bf16.model_output0').cast('float32').data
    const sample = latents('bf16.sample0').cast('float32').data
    const unrounded = sample.map((x, i) => x + round(dt * (velocity[i] as number)))
    const expected = golden('bf16.sample1').data
    expect(differingElements(castData(unrounded, 'float32', 'bfloat16'), expected)).toBeGreaterThan(0)
    const second = scheduler.timesteps[1] as number
    const other = scheduler.step(latents('bf16.model_output0'), second, latents('bf16.sample0'))
    expect(differingElements(other.data, expected)).toBeGreaterThan(100)
  })

  it.each(['float32', 'bfloat16', 'float16'] as const)('agrees with torch in %s, stochastic too', async (dtype) => {
    const { step: steps } = await ownGoldenJson<{ step: StepSamples }>('torch.json')
    const modelOutput = new Generator().manualSeed(1).randn([24]).cast(dtype)
    const sample = new Generator().manualSeed(2).randn([24]).cast(dtype)
    for (const stochasticSampling of [false, true]) {
      const sampler = new FlowMatchEulerDiscreteScheduler({ stochasticSampling })
      sampler.setTimesteps({ sigmas: [0.9545153379440308, 0.8749241232872009] })
      const generator = new Generator().manualSeed(3)
      const actual = sampler.step(modelOutput, sampler.timesteps[0] as number, sample, { generator })
      const expected = steps[dtype][stochasticSampling ? 'stochastic' : 'euler']
      expect([...actual.cast('float32').data]).toEqual(expected.map(Math.fround))
    }
  })

  it('starts where setBeginIndex says, and else at the second of two equal timesteps', () => {
    const v = Tensor.float32([1], [1])
    const x = Tensor.float32([1], [0])
    const repeating = new FlowMatchEulerDiscreteScheduler()
    const start = (begin?: number) => {
      repeating.setTimesteps({ sigmas: [0.5, 0.5, 0.25] })
      if (begin !== undefined) repeating.setBeginIndex(begin)
      repeating.step(v, 500, x)
      return repeating.stepIndex
    }
    expect([start(), start(0), start(1)]).toEqual([2, 1, 2])
  })

  it('refuses steps out of turn and leaves the run as it was', async () => {
    const v = Tensor.float32([2], [1, 1])
    const short = new FlowMatchEulerDiscreteScheduler()
    expect(await codeOf(() => short.step(v, 1000, v))).toBe('SCHEDULER_STEP')
    short.setTimesteps({ sigmas: [1, 0.5] })
    expect(await codeOf(() => short.step(v, 0, v))).toBe('SCHEDULER_STEP')
    expect(await codeOf(() => short.setBeginIndex(2))).toBe('SCHEDULER_STEP')
    short.step(v, 1000, v)
    expect(await codeOf(() => short.step(v, 1000, v))).toBe('SCHEDULER_STEP')
    expect(await codeOf(() => short.step(v, 500, Tensor.float32([1], [1])))).toBe('SCHEDULER_SHAPE')
    expect(short.stepIndex).toBe(1)
    short.step(v, 500, v)
    expect(await codeOf(() => short.step(v, 500, v))).toBe('SCHEDULER_STEP')
  })

  it('refuses dtypes that no model has and stochastic sampling without a generator', async () => {
    const whole = Tensor.int32([1], [1]) as unknown as Tensor<LatentDType>
    const stochastic = new FlowMatchEulerDiscreteScheduler({ stochasticSampling: true })
    stochastic.setTimesteps({ numInferenceSteps: 1 })
    const v = Tensor.float32([1], [1])
    expect(await codeOf(() => stochastic.step(v, 1000, v))).toBe('SCHEDULER_GENERATOR')
    scheduler.setTimesteps({ numInferenceSteps: 1, mu: 1 })
    expect(await codeOf(() => scheduler.step(whole, 1000, v))).toBe('DTYPE_UNSUPPORTED')
  })
})
