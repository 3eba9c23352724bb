import { join } from 'node:path'
import { castData, RankwiseError, readConfig, sameShape, Tensor } from '@rankwise/core'
import type { SubfolderOptions } from './config.ts'
import type { Generator } from './generator.ts'
import { linspace } from './linspace.ts'
import { type LatentDType, roundingOf } from './rounding.ts'
import {
  type FlowMatchEulerDiscreteSchedulerConfig,
  parseSchedulerConfig,
  schedulerConfigFromFile,
} from './scheduler-config.ts'

const { fround } = Math

/** numpy keeps the precision of its input: float32 sigmas round after every operation, float64 ones do not. */
type Round = (value: number) => number

const asIs: Round = (value) => value

const CONFIG_FILE = 'scheduler_config.json'

/** rho of Karras et al. 2022 (arXiv 2206.00364), section 5. */
const KARRAS_RHO = 7

/** How a schedule is laid out. */
export interface SetTimestepsOptions {
  /** Denoising steps; with `sigmas` it must be their number. */
  readonly numInferenceSteps?: number
  /**
   * One sigma for each step before shifting, descending within (0, 1].
   * @default evenly spaced over the training schedule
   */
  readonly sigmas?: readonly number[] | Float32Array
  /**
   * Amount of dynamic shifting, required with `useDynamicShifting`. Without it mu has no meaning and changes nothing,
   * as in diffusers, so that a pipeline can pass it to every checkpoint.
   */
  readonly mu?: number
}

/** Options of one step. */
export interface StepOptions {
  /** Source of the noise of `stochasticSampling`; required then. */
  readonly generator?: Generator
}

/**
 * Euler steps along a flow-matching ODE, as diffusers' scheduler of the same name: sigmas, timesteps and samples agree
 * with it bit for bit in float32 and bfloat16.
 *
 *     scheduler.setTimesteps({ sigmas, mu })
 *     for (const timestep of scheduler.timesteps) sample = scheduler.step(predict(sample, timestep), timestep, sample)
 */
export class FlowMatchEulerDiscreteScheduler {
  readonly config: FlowMatchEulerDiscreteSchedulerConfig
  #timesteps = new Float32Array(0)
  #sigmas = new Float32Array(0)
  #stepIndex: number | undefined
  #beginIndex: number | undefined

  /** @throws RankwiseError `CONFIG_INVALID`, `SCHEDULER_UNSUPPORTED` */
  constructor(config: Partial<FlowMatchEulerDiscreteSchedulerConfig> = {}) {
    this.config = parseSchedulerConfig({ ...config })
  }

  /**
   * Reads `scheduler_config.json` from a folder that diffusers' `save_pretrained` wrote.
   *
   * @throws RankwiseError `CONFIG_NOT_FOUND`, `CONFIG_INVALID`, `SCHEDULER_UNSUPPORTED`
   */
  static async fromPretrained(
    directory: string,
    { subfolder = '' }: SubfolderOptions = {},
  ): Promise<FlowMatchEulerDiscreteScheduler> {
    const folder = join(directory, subfolder)
    const file = await readConfig(folder, CONFIG_FILE)
    return new FlowMatchEulerDiscreteScheduler(schedulerConfigFromFile(file, join(folder, CONFIG_FILE)))
  }

  /** One timestep for each step, `sigma * numTrainTimesteps`; empty before `setTimesteps`. */
  get timesteps(): Float32Array {
    return this.#timesteps
  }

  /** One sigma for each step, then where the last step ends (0; 1 when inverted); empty before `setTimesteps`. */
  get sigmas(): Float32Array {
    return this.#sigmas
  }

  /** Index of the step that comes next; undefined before the first. */
  get stepIndex(): number | undefined {
    return this.#stepIndex
  }

  /**
   * Starts the denoising at a later step; call it after `setTimesteps`. Without it the first timestep is looked up.
   *
   * @throws RankwiseError `SCHEDULER_STEP` when there is no such step
   */
  setBeginIndex(beginIndex: number): void {
    if (!Number.isInteger(beginIndex) || beginIndex < 0 || beginIndex >= this.#timesteps.length) {
      throw stepError('there is no such step', { beginIndex, steps: this.#timesteps.length }, '0 <= beginIndex < steps')
    }
    this.#beginIndex = beginIndex
  }

  /**
   * Lays out the schedule and goes back to its start.
   *
   * @throws RankwiseError `SCHEDULER_SIGMAS`
   */
  setTimesteps(options: SetTimestepsOptions): void {
    const count = stepCount(options)
    const { config } = this
    const { mu } = options
    if (config.useDynamicShifting && !Number.isFinite(mu)) {
      throw sigmasError('dynamic shifting needs mu', { mu }, 'mu is a finite number when useDynamicShifting is on')
    }
    const round = options.sigmas === undefined ? asIs : fround
    const unshifted = options.sigmas === undefined ? this.#trainingSigmas(count) : Array.from(options.sigmas, fround)
    const shifted = this.#shift(unshifted, mu, round)
    this.#use(this.#respace(this.#stretch(shifted, round)))
  }

  /**
   * Goes one Euler step from `timestep` to the next.
   *
   * @param modelOutput predicted velocity; any shape
   * @param timestep the timestep that it was predicted for: the entry of `timesteps` whose turn it is
   * @param sample current sample, of the same shape
   * @returns the sample at the next timestep, in the dtype of `modelOutput`
   * @throws RankwiseError `SCHEDULER_STEP`, `SCHEDULER_SHAPE`, `SCHEDULER_GENERATOR`, `DTYPE_UNSUPPORTED`
   */
  step<D extends LatentDType>(
    modelOutput: Tensor<D>,
    timestep: number,
    sample: Tensor<LatentDType>,
    { generator }: StepOptions = {},
  ): Tensor<D> {
    const index = this.#indexFor(timestep)
    if (!sameShape(modelOutput.shape, sample.shape)) {
      throw new RankwiseError('SCHEDULER_SHAPE', 'model output and sample differ in shape', {
        actual: { modelOutput: modelOutput.shape, sample: sample.shape },
        rule: 'the shapes are equal',
      })
    }
    const sigma = this.#sigmas[index] as number
    const next = this.#sigmas[index + 1] as number
    const stepped = this.config.stochasticSampling
      ? stochasticStep(modelOutput, sample, sigma, next, requireGenerator(generator))
      : eulerStep(modelOutput, sample, fround(next - sigma))
    this.#stepIndex = index + 1
    return new Tensor(modelOutput.dtype, sample.shape, castData(stepped, 'float32', modelOutput.dtype))
  }

  /** Sigmas evenly spaced between the ends of the (shifted) training schedule, in float64 as diffusers has them. */
  #trainingSigmas(count: number): number[] {
    const { numTrainTimesteps, useDynamicShifting } = this.config
    const ends = [1, fround(1 / numTrainTimesteps)]
    const [max, min] = useDynamicShifting ? ends : this.#constantShift(ends, fround)
    const timesteps = linspace((max as number) * numTrainTimesteps, (min as number) * numTrainTimesteps, count)
    return timesteps.map((timestep) => timestep / numTrainTimesteps)
  }

  #shift(sigmas: readonly number[], mu: number | undefined, round: Round): number[] {
    if (!this.config.useDynamicShifting || mu === undefined) return this.#constantShift(sigmas, round)
    const e = round(this.config.timeShiftType === 'exponential' ? Math.exp(mu) : mu)
    return sigmas.map((sigma) => round(e / round(e + round(round(1 / sigma) - 1))))
  }

  #constantShift(sigmas: readonly number[], round: Round): number[] {
    const shift = round(this.config.shift)
    const excess = round(this.config.shift - 1)
    return sigmas.map((sigma) => round(round(shift * sigma) / round(1 + round(excess * sigma))))
  }

  #stretch(sigmas: readonly number[], round: Round): readonly number[] {
    const { shiftTerminal } = this.config
    if (shiftTerminal === null || shiftTerminal === 0) return sigmas
    const complements = sigmas.map((sigma) => round(1 - sigma))
    const scale = round((complements.at(-1) as number) / round(1 - shiftTerminal))
    return complements.map((complement) => round(1 - round(complement / scale)))
  }

  #respace(sigmas: readonly number[]): readonly number[] {
    const max = sigmas[0] as number
    const min = sigmas.at(-1) as number
    if (this.config.useExponentialSigmas) return linspace(Math.log(max), Math.log(min), sigmas.length).map(Math.exp)
    if (!this.config.useKarrasSigmas) return sigmas
    const maxRoot = max ** (1 / KARRAS_RHO)
    const minRoot = min ** (1 / KARRAS_RHO)
    return linspace(0, 1, sigmas.length).map((ramp) => (maxRoot + ramp * (minRoot - maxRoot)) ** KARRAS_RHO)
  }

  #use(schedule: readonly number[]): void {
    const { invertSigmas, numTrainTimesteps } = this.config
    const sigmas = Float32Array.from(schedule, (sigma) => (invertSigmas ? fround(1 - fround(sigma)) : sigma))
    if (!sigmas.every(Number.isFinite)) {
      throw sigmasError('the schedule is not finite', { sigmas: [...sigmas] }, 'sigmas lie in (0, 1]; mu is moderate')
    }
    this.#timesteps = sigmas.map((sigma) => sigma * numTrainTimesteps)
    this.#sigmas = Float32Array.of(...sigmas, invertSigmas ? 1 : 0)
    this.#stepIndex = undefined
    this.#beginIndex = undefined
  }

  #indexFor(timestep: number): number {
    const timesteps = this.#timesteps
    const index = this.#stepIndex ?? this.#beginIndex ?? this.#lookUp(timestep)
    if (timesteps[index] !== timestep) {
      const expected = timesteps[index] ?? 'none, the schedule is finished'
      throw stepError('it is not the turn of this timestep', { timestep, expected }, 'timesteps come in their order')
    }
    return index
  }

  /** Of equal timesteps the second, as in diffusers: a denoising that starts in the middle must not skip a sigma. */
  #lookUp(timestep: number): number {
    const first = this.#timesteps.indexOf(timestep)
    if (first === -1) {
      throw stepError(
        'the schedule has no such timestep',
        { timestep, timesteps: [...this.#timesteps] },
        'timestep is one of the timesteps laid out by setTimesteps',
      )
    }
    const second = this.#timesteps.indexOf(timestep, first + 1)
    return second === -1 ? first : second
  }
}

/**
 * The `mu` of FLUX.2's dynamic shifting, linear in the steps between a line fitted at 10 steps and one at 200; above
 * 4300 tokens the latter alone. Coefficients are those of `compute_empirical_mu` in diffusers' FLUX.2 pipelines.
 *
 * @param imageSeqLen tokens of the output image, without references: `height / 16 * width / 16`
 * @param numSteps denoising steps
 */
export function computeEmpiricalMu(imageSeqLen: number, numSteps: number): number {
  const at200 = 0.00016927 * imageSeqLen + 0.45666666
  if (imageSeqLen > 4300) return at200
  const at10 = 8.73809524e-5 * imageSeqLen + 1.89833333
  const slope = (at200 - at10) / 190
  return slope * numSteps + (at200 - 200 * slope)
}

/**
 * The timestep as a transformer takes it, `timestep / 1000`, with both roundings to the latents' dtype that diffusers'
 * pipelines make. In bfloat16 they move it by up to 0.4 %, and the model was used like that.
 */
export function modelTimestep(timestep: number, dtype: LatentDType): number {
  const round = roundingOf(dtype)
  return round(round(timestep) / 1000)
}

/** `sample + dt * modelOutput`: the product in the dtype of the model output, `dt` included, the sum in float32. */
function eulerStep<D extends LatentDType>(
  modelOutput: Tensor<D>,
  sample: Tensor<LatentDType>,
  dt: number,
): Float32Array {
  const round = roundingOf(modelOutput.dtype)
  const velocity = modelOutput.cast('float32').data
  const factor = round(dt)
  return sample.cast('float32').data.map((x, i) => x + round(factor * (velocity[i] as number)))
}

/** Estimates the clean sample and adds noise of the next sigma to it; roundings as in `eulerStep`. */
function stochasticStep<D extends LatentDType>(
  modelOutput: Tensor<D>,
  sample: Tensor<LatentDType>,
  sigma: number,
  next: number,
  generator: Generator,
): Float32Array {
  const round = roundingOf(modelOutput.dtype)
  const velocity = modelOutput.cast('float32').data
  const noise = generator.randn(sample.shape).data
  const factor = round(sigma)
  const kept = fround(1 - next)
  return sample.cast('float32').data.map((x, i) => {
    const clean = fround(x - round(factor * (velocity[i] as number)))
    return fround(kept * clean) + fround(next * (noise[i] as number))
  })
}

function stepCount({ numInferenceSteps, sigmas }: SetTimestepsOptions): number {
  const count = numInferenceSteps ?? sigmas?.length ?? 0
  if (!Number.isSafeInteger(count) || count < 1 || (sigmas !== undefined && sigmas.length !== count)) {
    throw sigmasError(
      'the number of steps is not clear',
      { numInferenceSteps, sigmas: sigmas?.length },
      'numInferenceSteps is an integer >= 1, or sigmas is a list of at least one; given both, their numbers agree',
    )
  }
  return count
}

function requireGenerator(generator: Generator | undefined): Generator {
  if (generator === undefined) {
    throw new RankwiseError('SCHEDULER_GENERATOR', 'stochastic sampling needs a generator', {
      rule: 'step gets a generator when stochasticSampling is on',
      remedy: 'pass { generator: new Generator().manualSeed(seed) }',
    })
  }
  return generator
}

function sigmasError(what: string, actual: Readonly<Record<string, unknown>>, rule: string): RankwiseError {
  return new RankwiseError('SCHEDULER_SIGMAS', what, { actual, rule })
}

function stepError(what: string, actual: Readonly<Record<string, unknown>>, rule: string): RankwiseError {
  return new RankwiseError('SCHEDULER_STEP', what, {
    actual,
    rule,
    remedy: 'call setTimesteps to start a new run',
  })
}
