import { RankwiseError } from '@rankwise/core'
import koffi from 'koffi'

/**
 * Stack of a call on another thread. koffi's own 128 KiB are too few for MPI_Init, which loads plug-ins and talks to the
 * network from deep inside.
 */
const STACK_BYTES = 4 * 2 ** 20

/** koffi takes its sizes only before it has loaded the first library, so this runs when the package is imported. */
export function raiseStacks(): void {
  if ((koffi.config().async_stack_size ?? 0) >= STACK_BYTES) return
  try {
    koffi.config({ async_stack_size: STACK_BYTES })
  } catch {
    // Too late; whoever then needs MPI is told by requireStacks. Ranks of one machine do not.
  }
}

/** @throws RankwiseError `MPI_STACK` */
export function requireStacks(): void {
  const stackBytes = koffi.config().async_stack_size ?? 0
  if (stackBytes >= STACK_BYTES) return
  throw new RankwiseError('MPI_STACK', 'native calls have too little stack for MPI', {
    where: 'koffi',
    actual: { async_stack_size: stackBytes },
    rule: `async_stack_size is at least ${STACK_BYTES}`,
    remedy: "import '@rankwise/collectives-mpi' before anything that loads a library with koffi",
  })
}
