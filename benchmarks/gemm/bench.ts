import { spawnSync } from 'node:child_process'
import { readFile } from 'node:fs/promises'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { PYTHON_ENVIRONMENT } from '../python.ts'
import type { Times } from './row.ts'

const SOURCE = fileURLToPath(new URL('bench.c', import.meta.url))
const TORCH = fileURLToPath(new URL('torch-linear.py', import.meta.url))
const NATIVE = fileURLToPath(new URL('../../packages/backend-ort/native/', import.meta.url))

/** Times products of x[m, k] and w[n, k]. */
export type Bench = (m: number, n: number, k: number, threads: number, repeats: number) => readonly Times[]

/** The kernels of backend-ort for this processor, with the options that the package compiles them with. */
export async function compileBench(folder: string): Promise<Bench> {
  const compiler = process.env.CC ?? 'cc'
  const build = JSON.parse(await readFile(join(NATIVE, 'gemm-variants.json'), 'utf8'))
  const objects = Object.entries<string[]>(build.variants[process.arch] ?? {}).map(([name, options]) => {
    const object = join(folder, `${name}.o`)
    const kernel = join(NATIVE, 'gemm-kernel.c')
    output(compiler, [...build.options, ...options, `-DVARIANT=${name}`, '-c', kernel, '-o', object])
    return object
  })
  const program = join(folder, 'bench')
  const sources = [join(NATIVE, 'gemm.c'), SOURCE]
  output(compiler, ['-O3', '-D_GNU_SOURCE', '-pthread', `-I${NATIVE}`, ...sources, ...objects, '-o', program])
  return (...numbers) => timesOf(output(program, numbers.map(String)))
}

/** torch.nn.functional.linear. */
export function torchBench(python: string): Bench {
  return (...numbers) => timesOf(output(python, [TORCH, ...numbers.map(String)], PYTHON_ENVIRONMENT))
}

function output(file: string, args: readonly string[], env: Readonly<Record<string, string>> = {}): string {
  const { status, error, stdout, stderr } = spawnSync(file, args, { encoding: 'utf8', env: { ...process.env, ...env } })
  if (error !== undefined) throw new Error(`${file} does not start`, { cause: error })
  if (status !== 0) throw new Error(`${file} fails (${status}):\n${stderr}`)
  return stdout
}

function timesOf(lines: string): readonly Times[] {
  return lines
    .trim()
    .split('\n')
    .map((line) => JSON.parse(line))
}
