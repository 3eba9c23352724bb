import { defineConfig } from 'vitest/config'

// Packages resolve to each other's sources, so that tests need no build and stack traces show TypeScript.
const conditions = ['@rankwise/source', 'node', 'import', 'module', 'default']

export default defineConfig({
  resolve: { conditions },
  ssr: { resolve: { conditions } },
  test: {
    include: ['packages/*/test/**/*.test.ts', 'examples/test/**/*.test.ts', 'benchmarks/test/**/*.test.ts'],
    pool: 'forks',
    // Suites with several ranks spawn up to four processes of their own: more files at a time only fight for cores.
    maxWorkers: 2,
    // A rank starts in about a second on an idle core; four of them on two busy ones take several.
    testTimeout: 30_000,
    hookTimeout: 60_000,
  },
})
