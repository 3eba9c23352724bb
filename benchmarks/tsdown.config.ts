import type { UserConfig } from 'tsdown'
import { library } from '../tsdown.base.ts'

/** The programs of ranks. */
const ranks = library('backends/rank.ts', 'collectives/rank.ts', 'load/rank.ts', 'step/rank.ts')

const config: UserConfig = { ...ranks, dts: false }
export default config
