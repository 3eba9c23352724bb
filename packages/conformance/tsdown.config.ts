import { library } from '../../tsdown.base.ts'

export default library('src/index.ts', 'src/compare.ts', 'src/ranks.ts')
