import { RankwiseError } from '@rankwise/core'
import koffi from 'koffi'
import { loadMpiLibrary, type MpiFamily, type MpiLibrary } from './library.ts'

/** A pointer of OpenMPI, an integer of MPICH. */
type Handle = bigint | number

/** The constants of mpi.h. */
interface Constants {
  readonly type: 'void *' | 'int'
  readonly world: Handle
  readonly byte: Handle
  readonly errorsReturn: Handle
  readonly ignoreStatus: bigint
}

interface Functions {
  readonly init: (argc: null, argv: null) => number
  readonly finalize: () => number
  readonly setErrorHandler: (comm: Handle, handler: Handle) => number
  readonly rank: (comm: Handle, out: Int32Array) => number
  readonly size: (comm: Handle, out: Int32Array) => number
  readonly send: Transfer
  readonly receive: Transfer
  readonly test: (request: bigint, flag: bigint, status: bigint) => number
  readonly probe: (source: number, tag: number, comm: Handle, flag: bigint, status: bigint) => number
  readonly errorText: (code: number, text: Uint8Array, length: Int32Array) => number
}

type Transfer = (
  data: bigint,
  count: number,
  type: Handle,
  peer: number,
  tag: number,
  comm: Handle,
  request: bigint,
) => number

/** A transfer that has been started. Its memory must stay where it is until {@link Mpi.isDone}. */
export type MpiRequest = number

const REQUESTS = 4096
const REQUEST_BYTES = 8
const ERROR_TEXT_BYTES = 1024

/** The few calls of MPI that Rankwise needs. They are made in a process of their own: they may block it, or end it. */
export class Mpi {
  readonly family: MpiFamily
  readonly version: string
  readonly #constants: Constants
  readonly #functions: Functions
  /** Handles of the requests, and behind them the flag that MPI_Test sets. */
  readonly #memory = new Uint8Array((REQUESTS + 1) * REQUEST_BYTES)
  readonly #address = koffi.address(this.#memory)
  readonly #flagAddress = this.#address + BigInt(REQUESTS * REQUEST_BYTES)
  readonly #flag = new Int32Array(this.#memory.buffer, REQUESTS * REQUEST_BYTES, 1)
  readonly #free = Array.from({ length: REQUESTS }, (_, slot) => REQUESTS - 1 - slot)

  private constructor(library: MpiLibrary) {
    this.family = library.family
    this.version = library.version
    this.#constants = library.family === 'OpenMPI' ? openMpiConstants(library) : MPICH_CONSTANTS
    this.#functions = bind(library, this.#constants.type)
  }

  /** @throws RankwiseError `MPI_NOT_FOUND`, `MPI_UNSUPPORTED` */
  static load(): Mpi {
    return new Mpi(loadMpiLibrary())
  }

  /** MPI_Init: returns when all others have called it. @throws RankwiseError `MPI_FAILED` */
  initialize(): void {
    const { init, setErrorHandler } = this.#functions
    this.#check('MPI_Init', init(null, null))
    this.#check('MPI_Comm_set_errhandler', setErrorHandler(this.#constants.world, this.#constants.errorsReturn))
  }

  /** MPI_Finalize: returns when all others have called it. @throws RankwiseError `MPI_FAILED` */
  finalize(): void {
    this.#check('MPI_Finalize', this.#functions.finalize())
  }

  /** Which of how many processes this one is for MPI. @throws RankwiseError `MPI_FAILED` */
  get world(): { readonly rank: number; readonly size: number } {
    const values = new Int32Array(2)
    this.#check('MPI_Comm_rank', this.#functions.rank(this.#constants.world, values.subarray(0, 1)))
    this.#check('MPI_Comm_size', this.#functions.size(this.#constants.world, values.subarray(1)))
    return { rank: values[0] as number, size: values[1] as number }
  }

  /** Starts to send `bytes` bytes at `address`. @throws RankwiseError `MPI_FAILED` */
  send(address: bigint, bytes: number, to: number, tag: number): MpiRequest {
    return this.#start('MPI_Isend', this.#functions.send, address, bytes, to, tag)
  }

  /** Starts to receive up to `bytes` bytes at `address`. @throws RankwiseError `MPI_FAILED` */
  receive(address: bigint, bytes: number, from: number, tag: number): MpiRequest {
    return this.#start('MPI_Irecv', this.#functions.receive, address, bytes, from, tag)
  }

  /** Whether a transfer is done; after that the request is void. @throws RankwiseError `MPI_FAILED` */
  isDone(request: MpiRequest): boolean {
    const code = this.#functions.test(this.#slot(request), this.#flagAddress, this.#constants.ignoreStatus)
    this.#check('MPI_Test', code)
    if (this.#flag[0] === 0) return false
    this.#free.push(request)
    return true
  }

  /** Lets MPI pass on what it has buffered. @throws RankwiseError `MPI_FAILED` */
  progress(): void {
    const { world, ignoreStatus } = this.#constants
    this.#check('MPI_Iprobe', this.#functions.probe(0, UNUSED_TAG, world, this.#flagAddress, ignoreStatus))
  }

  #start(call: string, transfer: Transfer, address: bigint, bytes: number, peer: number, tag: number): MpiRequest {
    const request = this.#free.pop()
    if (request === undefined) throw failed(call, this.version, `more than ${REQUESTS} transfers at a time`)
    const { byte, world } = this.#constants
    this.#check(call, transfer(address, bytes, byte, peer, tag, world, this.#slot(request)))
    return request
  }

  #slot(request: MpiRequest): bigint {
    return this.#address + BigInt(request * REQUEST_BYTES)
  }

  #check(call: string, code: number): void {
    if (code === 0) return
    const text = new Uint8Array(ERROR_TEXT_BYTES)
    const length = new Int32Array(1)
    this.#functions.errorText(code, text, length)
    throw failed(call, this.version, new TextDecoder().decode(text.subarray(0, length[0])) || `error ${code}`)
  }
}

/** A tag that no transfer has. MPI guarantees tags up to 32767. */
const UNUSED_TAG = 32_767

/** MPI ABI 12, from mpi.h of MPICH. */
const MPICH_CONSTANTS: Constants = {
  type: 'int',
  world: 0x44000000,
  byte: 0x4c00010d,
  errorsReturn: 0x54000001,
  ignoreStatus: 1n,
}

/** Handles of OpenMPI are the addresses of objects of the library. */
function openMpiConstants({ handle }: MpiLibrary): Constants {
  return {
    type: 'void *',
    world: handle.symbol('ompi_mpi_comm_world'),
    byte: handle.symbol('ompi_mpi_byte'),
    errorsReturn: handle.symbol('ompi_mpi_errors_return'),
    ignoreStatus: 0n,
  }
}

function bind({ handle, path }: MpiLibrary, type: Constants['type']): Functions {
  const func = (declaration: string) => handle.func(declaration) as unknown
  const transfer = (name: string) =>
    func(`int ${name}(void *data, int count, ${type} datatype, int peer, int tag, ${type} comm, void *request)`)
  try {
    return {
      init: func('int MPI_Init(void *argc, void *argv)'),
      finalize: func('int MPI_Finalize()'),
      setErrorHandler: func(`int MPI_Comm_set_errhandler(${type} comm, ${type} handler)`),
      rank: func(`int MPI_Comm_rank(${type} comm, void *rank)`),
      size: func(`int MPI_Comm_size(${type} comm, void *size)`),
      send: transfer('MPI_Isend'),
      receive: transfer('MPI_Irecv'),
      test: func('int MPI_Test(void *request, void *flag, void *status)'),
      probe: func(`int MPI_Iprobe(int source, int tag, ${type} comm, void *flag, void *status)`),
      errorText: func('int MPI_Error_string(int code, void *text, void *length)'),
    } as Functions
  } catch (cause) {
    throw new RankwiseError('MPI_UNSUPPORTED', 'the library lacks a function of MPI 3', { where: path, cause })
  }
}

function failed(call: string, version: string, text: string): RankwiseError {
  return new RankwiseError('MPI_FAILED', `${call} failed: ${text}`, {
    actual: { library: version },
    remedy: 'look at the messages of the MPI library on standard error',
  })
}
