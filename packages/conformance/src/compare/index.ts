export type { Comparable } from './comparable.ts'
export { type Difference, maxAbsDifference, relativeRms } from './compare.ts'
export { expectClose, type Tolerance } from './expect-close.ts'
export { type ToleranceRow, toleranceOf, toleranceRow } from './tolerance-table.ts'
