import { loadNative, SharedMemory } from '@rankwise/collectives-local/internals'
import { RankwiseError } from '@rankwise/core'
import koffi from 'koffi'
import { Mailbox, STATE } from './mailbox.ts'
import { Mpi } from './mpi.ts'
import { Orders } from './orders.ts'

// The program of the MPI process: it does nothing but what its rank, the parent process, orders through shared memory.
// MPI may block or end this process when another one is lost; that does the rank no harm.

const PR_SET_PDEATHSIG = 1
const SIGKILL = 9
/** MPI_Init loads plug-ins and talks to the network from deep inside. */
const STACK_BYTES = 8 * 2 ** 20
/** How long to look for the next order without sleeping: ranks give one after the other. */
const EAGER_MS = 0.2

const [parent, pid, descriptor, byteLength] = process.argv.slice(2).map(Number) as [number, number, number, number]

koffi.config({ sync_stack_size: STACK_BYTES })
endWithParent()
const native = await loadNative()
const memory = SharedMemory.open(native, pid, descriptor, byteLength)
memory.closeDescriptor()
const mailbox = new Mailbox(memory.bytes, memory.address, (address) => native.wake(address))
try {
  const mpi = Mpi.load()
  mpi.initialize()
  mailbox.world = mpi.world
  mailbox.tell(STATE.ready, JSON.stringify({ family: mpi.family, version: mpi.version }))
  await serve(mpi)
  mpi.finalize()
  mailbox.tell(STATE.finalized)
} catch (error) {
  mailbox.tell(STATE.failed, describe(error))
}
// At a regular exit, OpenMPI 4 runs into code of plug-ins that it has unloaded.
process.kill(process.pid, 'SIGKILL')

async function serve(mpi: Mpi): Promise<void> {
  const orders = new Orders(mpi, mailbox, memory.address)
  let busy = performance.now()
  while (mailbox.state !== STATE.finalizing) {
    const ticket = mailbox.ordersTicket
    if (orders.advance()) busy = performance.now()
    else if (performance.now() - busy > EAGER_MS) {
      mpi.progress()
      await native.sleep(mailbox.ordersAddress, ticket)
    }
  }
}

/** The kernel ends this process with its parent, however that one ends. */
function endWithParent(): void {
  const prctl = koffi
    .load(null)
    .func('int prctl(int option, unsigned long value, unsigned long, unsigned long, unsigned long)')
  prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
  if (process.ppid !== parent) process.kill(process.pid, 'SIGKILL')
}

function describe(error: unknown): string {
  const { code, message } =
    error instanceof RankwiseError ? error : { code: 'MPI_FAILED', message: (error as Error).message }
  const actual = error instanceof RankwiseError ? error.actual : {}
  const { where, rule, remedy } = error instanceof RankwiseError ? error : {}
  const [line = ''] = message.split('\n')
  return JSON.stringify({ code, what: line.replace(`[${code}] `, ''), details: { where, actual, rule, remedy } })
}
