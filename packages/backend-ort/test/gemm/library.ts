import { spawnSync } from 'node:child_process'
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import koffi, { type KoffiFunc, type LibraryHandle } from 'koffi'

const NATIVE = fileURLToPath(new URL('../../native/', import.meta.url))
const HARNESS = fileURLToPath(new URL('harness.c', import.meta.url))
const COMPILER = process.env.CC ?? 'cc'
const BUILD: Build = JSON.parse(readFileSync(join(NATIVE, 'gemm-variants.json'), 'utf8'))
const KERNELS = BUILD.variants[process.arch] ?? {}
const OBJECTS = ['gemm', 'harness', ...Object.keys(KERNELS)]
const RESULTS = ['done', 'touched memory outside of the matrices', 'no memory', 'no such variant']

interface Build {
  readonly options: readonly string[]
  /** Options of each kernel, by `process.arch`. */
  readonly variants: Readonly<Record<string, Readonly<Record<string, readonly string[]>>>>
}

/** Why the kernels cannot be tested; undefined where they can. */
export const NO_COMPILER = findCompiler()

function findCompiler(): string | undefined {
  const missing = whatIsMissing()
  if (missing !== undefined) process.stderr.write(`SKIPPED: tests of the matrix multiply of backend-ort: ${missing}\n`)
  return missing
}

function whatIsMissing(): string | undefined {
  if (process.platform !== 'linux') return 'its test program needs Linux'
  if (Object.keys(KERNELS).length === 0) return `it is not compiled for ${process.arch}`
  if (spawnSync(COMPILER, ['--version']).status !== 0) return `no C compiler '${COMPILER}' (set CC)`
  return undefined
}

/** Rows, columns and where they begin: strides in elements. */
export interface Sizes {
  readonly m: number
  readonly n: number
  readonly k: number
  readonly xStride: number
  readonly wStride: number
  readonly yStride: number
}

export type Tile = readonly [row: number, rowEnd: number, column: number, columnEnd: number]

export interface Placement {
  /** Whether the weights begin at an odd address. @default false */
  readonly odd?: boolean
  /** Whether matrices end before a page that must not be touched, or begin behind one. @default true */
  readonly atEnd?: boolean
  /** What is computed, or for how many workers. @default 1 */
  readonly tiles?: readonly Tile[] | number
  /** Columns of the parts that x is in. @default one part */
  readonly parts?: readonly number[]
  /** Whether y is rounded to bfloat16. @default false */
  readonly rounds?: boolean
}

/** gemm.c and its kernels, compiled as for the addon. */
export class GemmLibrary implements Disposable {
  /** Instruction sets of the kernels that this processor can run, the fastest first. */
  readonly variants: readonly string[]
  readonly #folder = mkdtempSync(join(tmpdir(), 'rankwise-gemm-'))
  readonly #library: LibraryHandle
  readonly #multiply: KoffiFunc<(...args: unknown[]) => number>
  readonly #tiles: KoffiFunc<(...args: unknown[]) => number>

  /**
   * @param mutant - a library whose fastest kernel is compiled anew, from a changed source, and is the only one to be
   *   used; by default every kernel is compiled from its own
   */
  constructor(mutant?: { readonly of: GemmLibrary; readonly change: (source: string) => string }) {
    const file = join(this.#folder, 'gemm.so')
    const source = readFileSync(join(NATIVE, 'gemm-kernel.c'), 'utf8')
    const objects =
      mutant === undefined ? this.#compileAll(source) : this.#compileMutant(mutant.of, mutant.change(source))
    cc(['-shared', '-pthread', ...objects, '-o', file])
    this.#library = koffi.load(file)
    const count: number = this.#library.func('int harness_variants()')()
    const name = this.#library.func('const char *harness_variant(int index)')
    this.variants = Array.from({ length: count }, (_, i) => name(i) as string)
    this.#multiply = this.#library.func(
      'int harness_multiply(int variant, uint32_t *sizes, float *x, uint32_t *columns, uint32_t part_count,' +
        ' uint16_t *w, _Inout_ float *y, int odd, int at_end, int rounds, uint32_t *tiles,' +
        ' uint32_t count)',
    )
    this.#tiles = this.#library.func(
      'uint32_t harness_tiles(uint32_t m, uint32_t n, uint32_t k, uint32_t workers, _Out_ uint32_t *tiles)',
    )
  }

  /** Writes y; says what went wrong, or undefined. */
  multiply(
    variant: string,
    sizes: Sizes,
    x: Float32Array,
    w: Uint16Array,
    y: Float32Array,
    { odd = false, atEnd = true, tiles = 1, parts = [sizes.k], rounds = false }: Placement = {},
  ): string | undefined {
    const numbers = Uint32Array.of(sizes.m, sizes.n, sizes.k, sizes.xStride, sizes.wStride, sizes.yStride)
    const own = typeof tiles === 'number' ? null : Uint32Array.from(tiles.flat())
    const count = typeof tiles === 'number' ? tiles : tiles.length
    const index = this.variants.indexOf(variant)
    const columns = Uint32Array.from(parts)
    const where = [Number(odd), Number(atEnd), Number(rounds), own, count] as const
    const result = this.#multiply(index, numbers, x, columns, parts.length, w, y, ...where)
    return result === 0 ? undefined : (RESULTS[result] ?? `result ${result}`)
  }

  /** The tiles that y is divided into. */
  tiles(m: number, n: number, k: number, workers: number): readonly Tile[] {
    const numbers = new Uint32Array(4 * workers)
    const count: number = this.#tiles(m, n, k, workers, numbers)
    return Array.from({ length: count }, (_, i) => [...numbers.subarray(4 * i, 4 * i + 4)] as unknown as Tile)
  }

  [Symbol.dispose](): void {
    this.#library.unload()
    rmSync(this.#folder, { recursive: true, force: true })
  }

  #compileAll(source: string): readonly string[] {
    cc(['-c', join(NATIVE, 'gemm.c'), '-o', this.#object('gemm')])
    cc(['-c', HARNESS, '-o', this.#object('harness')])
    for (const name of Object.keys(KERNELS)) this.#compileKernel(name, source)
    return OBJECTS.map((name) => this.#object(name))
  }

  #compileMutant(original: GemmLibrary, source: string): readonly string[] {
    const mutated = `gemm_${original.variants[0]}`
    this.#compileKernel(mutated, source)
    return OBJECTS.map((name) => (name === mutated ? this.#object(name) : original.#object(name)))
  }

  #compileKernel(name: string, source: string): void {
    const file = join(this.#folder, `${name}.c`)
    writeFileSync(file, source)
    cc([...(KERNELS[name] ?? []), `-DVARIANT=${name}`, '-c', file, '-o', this.#object(name)])
  }

  #object(name: string): string {
    return join(this.#folder, `${name}.o`)
  }
}

function cc(args: readonly string[]): void {
  const flags = [...BUILD.options, '-Wall', '-Wextra', '-Werror', `-I${NATIVE}`]
  const { status, stderr } = spawnSync(COMPILER, [...flags, ...args], { encoding: 'utf8' })
  if (status !== 0) throw new Error(`the matrix multiply does not compile:\n${stderr}`)
}
