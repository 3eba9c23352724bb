import { execFile } from 'node:child_process'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import { describe, expect, it } from 'vitest'
import { buildFolder } from '../src/native/addon.ts'
import { ENGINES, hasNative, nativeRequired } from './engines.ts'

describe('the native library', () => {
  it('is tested here, or need not be', () => {
    expect(ENGINES).toEqual(hasNative || nativeRequired ? ['wasm', 'native'] : ['wasm'])
  })

  it('is looked for where the script puts it', async () => {
    const script = fileURLToPath(new URL('../../../scripts/build-tfjs-native.mjs', import.meta.url))
    const { stdout } = await promisify(execFile)(process.execPath, [script, '--where'])
    expect(stdout.trim()).toBe(buildFolder())
  })
})
