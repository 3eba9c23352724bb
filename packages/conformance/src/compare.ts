export type { Comparable } from './compare/comparable.ts'
export { type Difference, maxAbsDifference, relativeRms } from './compare/compare.ts'
export { expectClose, type Tolerance } from './compare/expect-close.ts'
export { type ToleranceRow, toleranceOf, toleranceRow } from './compare/tolerance-table.ts'
