/**
 * `ncclConfig_t` of NCCL 2.30.7 behind its header, in order. Fields were only ever added at the end: an older library
 * reads the front part that it knows, a newer one takes its defaults for what `size` leaves out.
 */
export const CONFIG_FIELDS = [
  ['blocking', 'int'],
  ['cgaClusterSize', 'int'],
  ['minCTAs', 'int'],
  ['maxCTAs', 'int'],
  ['netName', 'pointer'],
  ['splitShare', 'int'],
  ['trafficClass', 'int'],
  ['commName', 'pointer'],
  ['collnetEnable', 'int'],
  ['CTAPolicy', 'int'],
  ['shrinkShare', 'int'],
  ['nvlsCTAs', 'int'],
  ['nChannelsPerNetPeer', 'int'],
  ['nvlinkCentricSched', 'int'],
  ['graphUsageMode', 'int'],
  ['numRmaCtx', 'int'],
  ['maxP2pPeers', 'int'],
  ['graphStreamOrdering', 'int'],
] as const

/** `NCCL_API_MAGIC` */
const MAGIC = 0xcafebeef
/** The `NCCL_VERSION_CODE` that the layout belongs to: the library must not look for fields of later versions. */
const VERSION = 23007
const HEADER_BYTES = 16
/** `NCCL_CONFIG_UNDEF_INT`: the library decides. */
const UNDEFINED = -(2 ** 31)

/** Configures a communicator whose calls return at once; everything else stays the library's default. */
export function nonBlockingConfig(): Uint8Array {
  const sizes = CONFIG_FIELDS.map(([, type]) => (type === 'int' ? 4 : 8))
  const bytes = new Uint8Array(sizes.reduce((sum, size) => sum + size, HEADER_BYTES))
  const view = new DataView(bytes.buffer)
  view.setBigUint64(0, BigInt(bytes.length), true)
  view.setUint32(8, MAGIC, true)
  view.setUint32(12, VERSION, true)
  let offset = HEADER_BYTES
  for (const [i, [name, type]] of CONFIG_FIELDS.entries()) {
    if (type === 'int') view.setInt32(offset, name === 'blocking' ? 0 : UNDEFINED, true)
    offset += sizes[i] as number
  }
  return bytes
}
