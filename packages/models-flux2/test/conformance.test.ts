import { defineModelConformance } from '@rankwise/conformance'
import { CONFORMANCE } from './conformance-options.ts'

defineModelConformance(CONFORMANCE)
