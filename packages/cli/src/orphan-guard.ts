import { type ChildProcess, spawn } from 'node:child_process'

/**
 * Reads which process groups run, until the launcher closes the pipe or the system does it for one that was killed.
 * Only then are there groups left; they get SIGTERM and, after $1 seconds, SIGKILL.
 */
const SCRIPT = `
while read -r what group; do
  case $what in
    started) groups="$groups $group" ;;
    ended) rest=; for g in $groups; do [ "$g" = "$group" ] || rest="$rest $g"; done; groups=$rest ;;
  esac
done
[ -n "$groups" ] || exit 0
for g in $groups; do kill -s TERM -- "-$g"; done
sleep "$1"
for g in $groups; do kill -s KILL -- "-$g"; done
`

/**
 * Ends the ranks of a launcher that can no longer do it, because it was killed by SIGKILL or ran out of memory. It is a
 * shell of its own, so that it also ends ranks that are busy in native code, and programs that know nothing of it.
 */
export class OrphanGuard implements Disposable {
  readonly #shell: ChildProcess

  /** @param onError gets the error of the system when the shell cannot be started */
  constructor(graceMs: number, onError: (error: Error) => void) {
    const args = ['-c', SCRIPT, 'rankwise-orphan-guard', String(graceMs / 1_000)]
    // A process group of its own: what ends the launcher's group, as Ctrl-C does, does not end the guard.
    this.#shell = spawn('/bin/sh', args, { stdio: ['pipe', 'ignore', 'ignore'], detached: true })
    this.#shell.on('error', onError)
    this.#shell.stdin?.on('error', () => {
      // Somebody has killed the guard; the launch goes on without.
    })
    this.#shell.unref()
  }

  /** @param group id of a process group, which is that of its first process */
  started(group: number): void {
    this.#shell.stdin?.write(`started ${group}\n`)
  }

  ended(group: number): void {
    this.#shell.stdin?.write(`ended ${group}\n`)
  }

  /** Ends the guard; ranks that are left are then nobody's. */
  [Symbol.dispose](): void {
    this.#shell.kill('SIGKILL')
    this.#shell.stdin?.destroy()
  }
}
