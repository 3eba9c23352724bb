import { openStore, rendezvousFromEnv } from '@rankwise/core'

// Ranks that only tell each other their numbers, on as many machines as there are.
const rendezvous = rendezvousFromEnv()
await using store = await openStore(rendezvous)
await store.set(`rank ${rendezvous.rank}`, Buffer.from(String(rendezvous.rank)))
const ranks = Array.from({ length: rendezvous.worldSize }, (_, rank) => store.get(`rank ${rank}`))
const values = (await Promise.all(ranks)).map(String)
process.stdout.write(`rank ${rendezvous.rank} of ${rendezvous.worldSize}: ${values}\n`)
