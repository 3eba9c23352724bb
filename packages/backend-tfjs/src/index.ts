export type { TfjsBackend } from './backend.ts'
export type { EngineName } from './engine.ts'
export type { EngineSelection, MatmulPrecision } from './engine-selection.ts'
export { type TfjsOptions, tfjs } from './tfjs.ts'
