import { execFile } from 'node:child_process'
import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import { describe, expect, test } from 'vitest'
import { NO_COMPILER, Stub } from './stub.ts'

const SCRIPT = fileURLToPath(new URL('gpu/main.ts', import.meta.url))
const PACKAGE = fileURLToPath(new URL('..', import.meta.url))
const NODE = ['--import', 'tsx', '--conditions=@rankwise/source']

function runScript(env: Record<string, string>, ...args: string[]): Promise<{ stdout: string; stderr: string }> {
  return promisify(execFile)(process.execPath, [...NODE, SCRIPT, ...args], {
    cwd: PACKAGE,
    env: { ...process.env, ...env },
  })
}

describe.skipIf(NO_COMPILER !== undefined)('`pnpm test:gpu`', () => {
  test('runs on one GPU with two ranks, and writes a record', async () => {
    using stub = new Stub()
    const json = join(stub.folder, 'record.json')
    const env = { ...stub.env(0, 'gpu'), STUB_DEVICES: '1' }
    const { stdout } = await runScript(env, '--bytes', '4,65536', '--json', json)
    expect(stdout).toMatch('1 GPU(s), 2 rank(s) on one GPU')
    const record = JSON.parse(readFileSync(json, 'utf8'))
    const names = ['results', 'mismatch', 'abort', 'kill', 'time']
    expect(record.checks).toEqual(Object.fromEntries(names.map((name) => [name, 'passed'])))
    // 2 sizes in 2 places, compared and not, and 4 sizes of slots.
    expect(record.rows).toHaveLength(2 * 2 * 2 + 4)
    for (const row of record.rows) expect(row.microseconds).toBeGreaterThan(0)
  }, 170_000)

  test('fails when a rank fails', async () => {
    using stub = new Stub()
    const env = { ...stub.env(0, 'gpu'), STUB_DEVICES: '1', STUB_NCCL_VERSION: '22907', STUB_FAULT: 'init:3' }
    const failure = await runScript(env, '--bytes', '4').catch((error) => error)
    expect(failure.code).toBe(1)
    expect(failure.stdout).toMatch(/✗ results[\s\S]*NCCL_ERROR/)
    expect(failure.stdout).toMatch('- kill: SKIPPED, needs 2 ranks')
  }, 60_000)
})
