// Importing this file registers every primitive operation.
import './elementwise.ts'
import './linear.ts'
import './movement.ts'
import './norm.ts'
import './attention.ts'
import './spatial.ts'
