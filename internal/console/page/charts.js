// Charts over time, drawn by uPlot. They share a cursor and a time range.
import { h } from './dom.js'
import { walBytes, walSteps } from './format.js'

const ranges = { '5 min': 300, '15 min': 900, '1 h': 3600 }
const sync = uPlot.sync('time')
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim()
const two = (n) => String(n).padStart(2, '0')

const minutes = [60, 120, 300, 600, 900, 1800] // steps of the axis of time

const times = (u, splits) => splits.map((t) => {
  const d = new Date(t * 1000)
  return `${two(d.getUTCHours())}:${two(d.getUTCMinutes())}`
})

// chart is {node, update(series, to), theme()}. spec: {title, format, steps, least, lines: [{field, name, color, dash, fill, limit}]}.
// A line that is a limit is seen when the others come near it.
function chart(spec, range) {
  const values = spec.lines.map((l) => h('b', {}, '–'))
  const legend = spec.lines.map((l, i) =>
    h('span', { class: 'line' }, h('span', { class: `swatch ${l.color} ${l.dash ? 'dash' : ''}` }), l.name && l.name + ' ', values[i]))
  const plot = h('div', { class: 'plot', role: 'img' })
  const node = h('section', { class: 'panel chart' },
    h('header', {}, h('h2', {}, spec.title), h('div', { class: 'legend' }, legend)), plot)
  let u = null, series = null, to = 0

  const columns = () => [series.t, ...spec.lines.map((l) => series[l.field])]

  function say() {
    const at = u?.cursor.idx ?? series.t.length - 1
    const shown = spec.lines.map((l, i) => spec.format(u.data[i + 1][at]))
    shown.forEach((text, i) => (values[i].textContent = text))
    if (u.cursor.idx === null || u.cursor.idx === undefined) {
      plot.setAttribute('aria-label', `${spec.title}: ` + spec.lines.map((l, i) => `${l.name} ${shown[i]}`).join(', '))
    }
  }

  function make() {
    const size = parseFloat(getComputedStyle(document.documentElement).fontSize) - 3
    const axis = {
      stroke: css('--muted'), font: `${size}px ${css('--sans')}`,
      ticks: { show: false }, grid: { stroke: css('--grid'), width: 1 },
    }
    const limit = spec.lines.find((l) => l.limit)
    const top = (_, __, max) => {
      const most = limit ? series[limit.field].at(-1) ?? 0 : 0
      return [0, uPlot.rangeNum(0, Math.max(max ?? 0, spec.least ?? 1, most < max * 4 ? most : 0), 0.1, true)[1]]
    }
    u?.destroy()
    u = new uPlot({
      width: plot.clientWidth || 300, height: plot.clientHeight || 150, padding: [8, 18, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: sync.key }, drag: { x: false, y: false }, points: { size: 6 }, y: false },
      scales: { x: { range: () => [to - range.seconds, to] }, y: { range: top } },
      axes: [
        { ...axis, values: times, incrs: minutes, size: 26, space: 44, grid: { show: false } },
        { ...axis, values: (_, splits) => splits.map(spec.format), size: 62, space: 32, gap: 6, ...(spec.steps && { incrs: spec.steps }) },
      ],
      series: [{}, ...spec.lines.map((l) => ({
        stroke: css('--' + l.color), width: 1.75, dash: l.dash && [6, 4], spanGaps: false,
        fill: l.fill && css('--' + l.color) + '1f', points: { show: false }, auto: !l.limit,
      }))],
      hooks: { setCursor: [say] },
    }, columns(), plot)
  }

  new ResizeObserver(() => u && plot.clientWidth && u.setSize({ width: plot.clientWidth, height: plot.clientHeight })).observe(plot)

  return {
    node,
    update(next, at) {
      series = next
      to = at
      if (!plot.isConnected || !series.t.length) return
      if (u) u.setData(columns())
      else make()
      say()
    },
    theme: () => u && plot.isConnected && (make(), say()),
  }
}

// charts draws several. Their node is the view's as long as the view is shown.
export function charts(specs) {
  const range = { seconds: Number(localStorage.getItem('walpost.range')) || 900 }
  const all = specs.map((s) => chart(s, range))
  const node = h('div', { class: 'charts' }, all.map((c) => c.node))
  node.own = true
  let last = null
  const update = (series) => {
    last = series
    const to = series.t.at(-1) ?? Date.now() / 1000
    for (const c of all) c.update(series, to)
  }
  const choose = (seconds, redraw) => () => {
    range.seconds = seconds
    localStorage.setItem('walpost.range', seconds)
    if (last) update(last)
    redraw()
  }
  return {
    node, update,
    theme: () => all.forEach((c) => c.theme()),
    // choice is of the range.
    choice: (redraw) => h('span', { class: 'choice', role: 'group', 'aria-label': 'Time range' },
      Object.entries(ranges).map(([name, seconds]) => h('button', {
        type: 'button', onclick: choose(seconds, redraw), 'aria-pressed': String(seconds === range.seconds),
      }, name))),
  }
}

// retainedWAL is in two views.
export const retainedWAL = { title: 'Retained WAL', format: walBytes, steps: walSteps, lines: [
  { field: 'retained_bytes', name: '', color: 'line1', fill: true },
  { field: 'budget_bytes', name: 'of', color: 'line3', dash: true, limit: true },
] }

// lastOf is the newest value that is known.
export const lastOf = (column) => column?.findLast((v) => v !== null) ?? null

const most = 1800 // points: an hour at 2 s

// extend adds the new points behind the old ones.
export function extend(old, fresh) {
  if (!old?.t.length) return fresh
  const joined = { ...fresh }
  for (const [name, column] of Object.entries(fresh)) {
    if (Array.isArray(column)) joined[name] = [...(old[name] ?? []), ...column].slice(-most)
  }
  return joined
}
