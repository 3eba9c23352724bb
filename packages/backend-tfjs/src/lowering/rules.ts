import { attentionRules } from './attention.ts'
import { elementwiseRules } from './elementwise.ts'
import { linearRules } from './linear.ts'
import { movementRules } from './movement.ts'
import { normRules } from './norm.ts'
import type { Rules } from './rule.ts'
import { spatialRules } from './spatial.ts'

/** How every operation of `@rankwise/core` but `all_reduce` runs; that one never reaches a backend. */
export const RULES: Rules = {
  ...elementwiseRules,
  ...linearRules,
  ...movementRules,
  ...normRules,
  ...attentionRules,
  ...spatialRules,
}
