/** The command line of a rank. */
export interface RankCommand {
  readonly file: string
  readonly args: readonly string[]
  readonly env?: Readonly<Record<string, string>>
}
