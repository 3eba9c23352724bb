import { execFile } from 'node:child_process'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import { describe, expect, it } from 'vitest'

describe('ONNX Runtime', () => {
  it('prints nothing, not even when it fails', async () => {
    const script = fileURLToPath(new URL('workers/failing-process.ts', import.meta.url))
    const flags = ['--import', 'tsx', '--conditions=@rankwise/source']
    const cwd = fileURLToPath(new URL('../../..', import.meta.url))
    const { stdout, stderr } = await promisify(execFile)(process.execPath, [...flags, script], { cwd })
    expect(stderr).toBe('')
    expect(stdout).toBe('ORT_COMPILE ORT_RUN ORT_SHAPE')
  })
})
