// `pnpm build:wasm` writes src/wasm-module.ts from wasm/reduce-wat.ts. The result is committed: it is small, and the same everywhere.
import { writeFileSync } from 'node:fs'
import wabt from 'wabt'
import { reduceWat } from './reduce-wat.ts'

/** The text of src/wasm-module.ts. */
export async function wasmModuleSource(): Promise<string> {
  const { parseWat } = await wabt()
  const module = parseWat('reduce.wat', reduceWat(), { simd: true })
  try {
    module.validate()
    const base64 = Buffer.from(module.toBinary({}).buffer).toString('base64')
    const lines = (base64.match(/.{1,100}/g) ?? []).map((line) => `  '${line}',`)
    return `// Made by wasm/build.ts from wasm/reduce-wat.ts; do not edit.

/** The WebAssembly kernel, in base64. */
export const WASM_MODULE = [
${lines.join('\n')}
].join('')
`
  } finally {
    module.destroy()
  }
}

if (import.meta.filename === process.argv[1]) {
  writeFileSync(new URL('../src/wasm-module.ts', import.meta.url), await wasmModuleSource())
}
