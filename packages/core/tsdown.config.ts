import { library } from '../../tsdown.base.ts'

export default library('src/index.ts', 'src/collectives/index.ts', 'src/reference/index.ts')
