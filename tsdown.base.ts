import { fileURLToPath } from 'node:url'
import { defineConfig, type UserConfig } from 'tsdown'

/**
 * The build of every package: one ES module and one declaration file per entry, dependencies left as imports.
 *
 * @param entries source files, relative to the package; `src/x.ts` becomes `dist/x.js` and `dist/x.d.ts`
 */
export function library(...entries: [string, ...string[]]): UserConfig {
  return defineConfig({
    entry: entries,
    format: 'esm',
    platform: 'node',
    target: 'node20',
    // The packages are `"type": "module"`: `.js` already means ESM, and `exports` names `.js` and `.d.ts`.
    fixedExtension: false,
    tsconfig: fileURLToPath(new URL('tsconfig.json', import.meta.url)),
    dts: { sourcemap: true },
    sourcemap: true,
    deps: {
      // Nothing from node_modules or from another package may end up in a bundle unnoticed.
      onlyBundle: [],
    },
    failOnWarn: true,
    // How long plugins take depends on what else the machine does; it is no fault of a package.
    checks: { pluginTimings: false },
    report: false,
  })
}
