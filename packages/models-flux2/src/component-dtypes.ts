import { type Backend, DTYPES, RankwiseError, textOf } from '@rankwise/core'
import { checkOptionNames } from './option-names.ts'

/** What the models of a FLUX.2 pipeline compute in. */
export type PipelineDType = 'float32' | 'bfloat16'

/** The models of a pipeline, of which each may compute in a dtype of its own. */
export type ComponentName = 'transformer' | 'textEncoder' | 'vae'

/** One dtype for all models of a pipeline, or one for each; `default` is for those that are not named. */
export type ComponentDTypes = PipelineDType | { readonly [K in ComponentName | 'default']?: PipelineDType }

/** Of a pipeline, the largest first. */
export const COMPONENTS: readonly ComponentName[] = ['transformer', 'textEncoder', 'vae']
const SUPPORTED: readonly unknown[] = ['float32', 'bfloat16'] satisfies readonly PipelineDType[]
const DEFAULT_DTYPE = 'float32'

/** The dtype of one model. */
export function dtypeOf(component: ComponentName, dtype: ComponentDTypes = DEFAULT_DTYPE): PipelineDType {
  if (typeof dtype === 'string') return dtype
  return dtype[component] ?? dtype.default ?? DEFAULT_DTYPE
}

/** What `checkDTypes` looks at. */
interface DTypeOptions extends Readonly<Partial<Record<ComponentName, unknown>>> {
  readonly backend: Backend
  readonly dtype?: ComponentDTypes
}

/** @throws RankwiseError `OPTION_UNKNOWN`, `OPTION_INVALID`, `OPTION_CONFLICT`, `DTYPE_UNSUPPORTED` */
export function checkDTypes({ backend, dtype, ...given }: DTypeOptions): void {
  if (dtype === undefined) return
  if (typeof dtype === 'object' && dtype !== null && !Array.isArray(dtype)) {
    checkOptionNames('dtype', dtype, [...COMPONENTS, 'default'])
    for (const [name, value] of Object.entries(dtype)) checkDType(`dtype.${name}`, value)
    for (const name of COMPONENTS) if (dtype[name] !== undefined && given[name] !== undefined) throw alreadyLoaded(name)
  } else {
    checkDType('dtype', dtype)
  }
  const missing = COMPONENTS.filter((name) => given[name] === undefined)
  if (missing.length === 0) throw nothingToLoad()
  for (const name of missing) requireSupport(backend, name, dtypeOf(name, dtype))
}

function checkDType(where: string, value: unknown): void {
  if (value === undefined || SUPPORTED.includes(value)) return
  const isOther = (DTYPES as readonly unknown[]).includes(value)
  throw new RankwiseError(isOther ? 'DTYPE_UNSUPPORTED' : 'OPTION_INVALID', `${where} cannot be ${textOf(value)}`, {
    where,
    rule: `${where} is ${SUPPORTED.join(' or ')}${isOther ? ', which the models of FLUX.2 are checked in' : ''}`,
  })
}

/** A backend that is none is refused by the models. */
function requireSupport(backend: Partial<Backend> | undefined, component: ComponentName, dtype: PipelineDType): void {
  const supported = backend?.supports?.dtypes
  if (supported === undefined || supported.includes(dtype)) return
  throw new RankwiseError('DTYPE_UNSUPPORTED', `the backend ${backend?.name} does not compute in ${dtype}`, {
    where: `dtype of the ${component}`,
    actual: { dtype, supported },
    rule: 'dtype is one that the backend computes in; weights stored in another are cast after slicing',
  })
}

function nothingToLoad(): RankwiseError {
  return new RankwiseError('OPTION_CONFLICT', 'all models are loaded already', {
    where: 'dtype',
    rule: 'dtype is that of models which are loaded here',
    remedy: 'pass dtype to the fromPretrained of each model',
  })
}

function alreadyLoaded(component: ComponentName): RankwiseError {
  return new RankwiseError('OPTION_CONFLICT', `the ${component} is loaded already`, {
    where: `dtype.${component}`,
    rule: 'dtype is that of models which are loaded here',
    remedy: `pass dtype to the fromPretrained of the ${component}`,
  })
}
