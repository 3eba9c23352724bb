export { onRanks, RankProcesses, type RankProcessesOptions } from './rank-processes.ts'
export { type BackendRankOptions, runBackendRank } from './run-backend-rank.ts'
export { runCollectivesRank } from './run-collectives-rank.ts'
export { type RankOutcome, runRank } from './run-rank.ts'
