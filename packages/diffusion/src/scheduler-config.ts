import { RankwiseError } from '@rankwise/core'
import { z } from 'zod'
import { camelizeConfig, parseWith } from './config.ts'

const CLASS_NAME = 'FlowMatchEulerDiscreteScheduler'

/** Options of a `FlowMatchEulerDiscreteScheduler`: those of diffusers' `scheduler_config.json` in camelCase. */
export interface FlowMatchEulerDiscreteSchedulerConfig {
  /** Timesteps of the training schedule; a timestep is `sigma * numTrainTimesteps`. @default 1000 */
  readonly numTrainTimesteps: number
  /**
   * Constant shift of the sigmas towards 1, `shift * s / (1 + (shift - 1) * s)`; unused with dynamic shifting.
   * @default 1
   */
  readonly shift: number
  /**
   * Shift by the `mu` that `setTimesteps` gets, which depends on the image size, instead of by `shift`.
   * @default false
   */
  readonly useDynamicShifting: boolean
  /** For pipelines that interpolate `mu` between two image sizes; the scheduler does not use it. @default 0.5 */
  readonly baseShift: number | null
  /** As `baseShift`. @default 1.15 */
  readonly maxShift: number | null
  /** Image tokens at which a pipeline takes `baseShift`; the scheduler does not use it. @default 256 */
  readonly baseImageSeqLen: number
  /** Image tokens at which a pipeline takes `maxShift`; the scheduler does not use it. @default 4096 */
  readonly maxImageSeqLen: number
  /** Run the schedule from `1 - sigma`, ending at 1 (Mochi). @default false */
  readonly invertSigmas: boolean
  /** Sigma to which the last step's sigma is stretched; null and 0 leave the schedule as it is. @default null */
  readonly shiftTerminal: number | null
  /** Respace as Karras et al. 2022 (arXiv 2206.00364), eq. 5, with rho 7. @default false */
  readonly useKarrasSigmas: boolean
  /** Respace evenly in log sigma. @default false */
  readonly useExponentialSigmas: boolean
  /** Formula of dynamic shifting, with `e = exp(mu)` or `e = mu`: `e / (e + 1 / s - 1)`. @default 'exponential' */
  readonly timeShiftType: 'exponential' | 'linear'
  /** Draw fresh noise in every step instead of following the ODE. @default false */
  readonly stochasticSampling: boolean
}

const schema = z.object({
  numTrainTimesteps: z.number().int().positive().default(1000),
  shift: z.number().positive().default(1),
  useDynamicShifting: z.boolean().default(false),
  baseShift: z.number().nullable().default(0.5),
  maxShift: z.number().nullable().default(1.15),
  baseImageSeqLen: z.number().int().positive().default(256),
  maxImageSeqLen: z.number().int().positive().default(4096),
  invertSigmas: z.boolean().default(false),
  shiftTerminal: z.number().min(0).lt(1).nullable().default(null),
  useKarrasSigmas: z.boolean().default(false),
  useExponentialSigmas: z.boolean().default(false),
  timeShiftType: z.enum(['exponential', 'linear']).default('exponential'),
  stochasticSampling: z.boolean().default(false),
})

/**
 * Completes options with their defaults and checks them.
 *
 * @param where file or class that messages name
 * @throws RankwiseError `CONFIG_INVALID` for an option of the wrong type, `SCHEDULER_UNSUPPORTED` for an option
 *   that is on and unknown here (`use_beta_sigmas`, or one of a later diffusers) and for two respacings at once
 */
export function parseSchedulerConfig(
  options: Readonly<Record<string, unknown>>,
  where: string = CLASS_NAME,
): FlowMatchEulerDiscreteSchedulerConfig {
  const unknown = Object.entries(options).filter(
    ([key, value]) => !(key in schema.shape) && value !== false && value !== null,
  )
  if (unknown.length > 0) {
    throw new RankwiseError('SCHEDULER_UNSUPPORTED', 'the config turns on options that this scheduler does not have', {
      where,
      actual: Object.fromEntries(unknown),
      rule: `options are ${Object.keys(schema.shape).join(', ')}`,
    })
  }
  const config = parseWith(schema, options, where)
  if (config.useKarrasSigmas && config.useExponentialSigmas) {
    throw new RankwiseError('SCHEDULER_UNSUPPORTED', 'two respacings of the sigmas are on', {
      where,
      actual: { useKarrasSigmas: true, useExponentialSigmas: true },
      rule: 'at most one of the two',
    })
  }
  return config
}

/**
 * The config in a `scheduler_config.json`.
 *
 * @throws RankwiseError `SCHEDULER_UNSUPPORTED` when the file belongs to another class, and as `parseSchedulerConfig`
 */
export function schedulerConfigFromFile(file: unknown, path: string): FlowMatchEulerDiscreteSchedulerConfig {
  const { _class_name: className = CLASS_NAME } = parseWith(
    z.looseObject({ _class_name: z.string().optional() }),
    file,
    path,
  )
  if (className !== CLASS_NAME) {
    throw new RankwiseError('SCHEDULER_UNSUPPORTED', 'the config belongs to another scheduler', {
      where: path,
      actual: { _class_name: className },
      rule: `_class_name is ${CLASS_NAME}`,
    })
  }
  return parseSchedulerConfig(camelizeConfig(file), path)
}
