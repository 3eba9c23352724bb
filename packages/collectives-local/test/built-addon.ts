import { type Addon, loadAddon } from '../src/native-kernel.ts'

/** The addon; undefined where it could not be compiled. Its tests are then reported as skipped. */
export function builtAddon(): Addon | undefined {
  try {
    return loadAddon()
  } catch {
    return undefined
  }
}
