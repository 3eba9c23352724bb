import { register } from 'node:module'

// Preloaded with --import: this process finds no koffi, as where its native part is missing.
const hooks = `export async function resolve(name, context, next) {
  if (name === 'koffi') throw new Error('Cannot find the native Koffi module')
  return next(name, context)
}`
register(`data:text/javascript,${encodeURIComponent(hooks)}`)
