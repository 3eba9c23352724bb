export * from './conv.ts'
export * from './embedding.ts'
export * from './linear.ts'
export * from './norm.ts'
