import { caseOf, engineOf, type Row } from './row.ts'

const WIDTH = 720
const LABEL = 130
const BAR = 18
const COLORS = ['#2563eb', '#0d9488', '#d97706', '#9333ea', '#dc2626', '#64748b']

/** A page with a bar for every row: seconds of a step, grouped by what is compared. It needs nothing beside it. */
export function chartPage(rows: readonly Row[], title: string): string {
  const engines = [...new Set(rows.map(engineOf))]
  const groups = [...new Set(rows.map(caseOf))].map((name) => rows.filter((row) => caseOf(row) === name))
  const charts = groups.map((group) =>
    chart(group, (row) => COLORS[engines.indexOf(engineOf(row)) % COLORS.length] as string),
  )
  return `<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>${escapeText(title)}</title>
<style>
  body { font: 14px system-ui, sans-serif; margin: 2rem auto; max-width: ${WIDTH}px; color: #0f172a; background: #fff }
  h2 { font-size: 1rem; margin: 1.5rem 0 .25rem } text { font: 12px system-ui, sans-serif }
</style>
<h1>${escapeText(title)}</h1>
<p>Seconds of a step; shorter is better. The line at the end of a bar goes from the fastest to the slowest step.</p>
${charts.join('\n')}
</html>
`
}

function chart(rows: readonly Row[], colorOf: (row: Row) => string): string {
  const scale = (WIDTH - LABEL - 130) / Math.max(...rows.map(({ maxSeconds }) => maxSeconds))
  const bars = rows.map((row, i) => {
    const [y, middle] = [i * (BAR + 6), i * (BAR + 6) + BAR / 2]
    const [end, from, to] = [row.seconds, row.minSeconds, row.maxSeconds].map((seconds) => LABEL + scale * seconds)
    return [
      `<text x="${LABEL - 8}" y="${middle + 4}" text-anchor="end">${escapeText(engineOf(row))}</text>`,
      `<rect x="${LABEL}" y="${y}" width="${((end as number) - LABEL).toFixed(1)}" height="${BAR}" fill="${colorOf(row)}"/>`,
      `<path d="M${from?.toFixed(1)} ${middle}H${to?.toFixed(1)}" stroke="#0f172a"/>`,
      `<text x="${((to as number) + 6).toFixed(1)}" y="${middle + 4}">${row.seconds.toFixed(2)} s, ${row.gflops.toFixed(0)} GFLOP/s</text>`,
    ].join('')
  })
  const [first] = rows as [Row]
  return `<h2>${escapeText(caseOf(first).replaceAll(/ +/g, ' ').trim())}</h2>
<svg width="${WIDTH}" height="${rows.length * (BAR + 6)}" role="img">${bars.join('')}</svg>`
}

function escapeText(text: string): string {
  return text.replaceAll('&', '&amp;').replaceAll('<', '&lt;')
}
