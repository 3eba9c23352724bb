import { library } from '../../tsdown.base.ts'

export default library('src/index.ts', 'src/compare/index.ts', 'src/ranks/index.ts')
