export { onRanks, RankProcesses, type RankProcessesOptions } from './ranks/rank-processes.ts'
export { type BackendRankOptions, runBackendRank } from './ranks/run-backend-rank.ts'
export { runCollectivesRank } from './ranks/run-collectives-rank.ts'
export { type RankOutcome, runRank } from './ranks/run-rank.ts'
