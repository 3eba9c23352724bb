// A rank whose behaviour is its arguments: one `rank:action:value` after another, in order; `*` is every rank.
import { spawn } from 'node:child_process'
import { setTimeout } from 'node:timers/promises'

const actions = {
  print: (text) => process.stdout.write(`${text}\n`),
  write: (text) => process.stdout.write(text),
  error: (text) => process.stderr.write(`${text}\n`),
  env: (names) => process.stdout.write(`${names.split(',').map((name) => process.env[name])}\n`),
  pid: () => process.stdout.write(`pid ${process.pid}\n`),
  sleep: (ms) => setTimeout(Number(ms)),
  failBefore: (restart) => Number(process.env.TORCHELASTIC_RESTART_COUNT) < Number(restart) && process.exit(9),
  spin: (ms) => {
    const end = performance.now() + Number(ms)
    while (performance.now() < end) {
      // hold the event loop, as a synchronous native call does
    }
  },
  exit: (code) => process.exit(Number(code)),
  signal: (name) => process.kill(process.pid, name),
  ignore: (name) => process.on(name, () => process.stdout.write(`ignored ${name}\n`)),
  child: () => {
    const child = spawn('sleep', ['30'], { stdio: 'ignore' })
    child.unref()
    process.stdout.write(`child ${child.pid}\n`)
  },
  stdin: async () => {
    for await (const chunk of process.stdin) process.stdout.write(`read ${chunk}`)
  },
}

for (const argument of process.argv.slice(2)) {
  const [rank, action, value] = argument.split(':')
  if (rank === '*' || rank === process.env.RANK) await actions[action](value)
}
