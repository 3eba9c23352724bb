export type { OrtBackend } from './backend.ts'
export { type OrtOptions, ort } from './ort.ts'
export type { WeightsMode } from './weight-loader.ts'
