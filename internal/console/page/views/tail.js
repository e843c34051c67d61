// Live tail: events as they are stored in the stream, the newest first.
import { ApiError, open as openStream } from '../api.js'
import { details } from '../dialog.js'
import { data, h, visible } from '../dom.js'
import { bytes, clock, count, number } from '../format.js'
import { payload } from '../payload.js'
import { button, empty, facts, moment, notice, panel, problem, table } from '../widgets.js'

const most = 500 // lines that are kept
const mostTypes = 100 // that are offered

const columns = [
  { name: 'Sequence', cls: 'c-seq p2', cell: (e) => number(e.sequence) },
  { name: 'Time', cls: 'c-clock', cell: (e) => h('time', { datetime: e.at }, clock(e.at)) },
  { name: 'Type', cls: 'c-name', cell: (e) => data(e.type) },
  { name: 'Aggregate', cls: 'c-name p2', cell: (e) => data(e.aggregate) },
  { name: 'Size', cls: 'c-num p3', cell: (e) => bytes(e.bytes) },
  { name: 'Payload', cls: 'c-wide mono', cell: (e) => data((e.payload ?? e.payload_base64)?.slice(0, 300)) },
]

function open(ctx, event) {
  const state = {}
  const drawer = details(`Event ${number(event.sequence)}`, () => [
    facts([
      ['Type', event.type], ['Aggregate', event.aggregate], ['Tenant', event.tenant_id], ['Subject', event.subject], ['Id', event.id],
      ['Stored', moment(event.at)], event.replay && ['Replay', 'it was published again'], !event.relayed && ['Written by', 'another writer than walpost'],
    ]),
    payload({ ...event, payload_bytes: event.bytes }, ctx.overview, state, () => drawer?.update()),
  ])
}

// follow reads the stream until it ends; it begins again while the view is open and the tab is visible.
async function follow(ctx) {
  const l = ctx.local
  l.stop = new AbortController()
  const q = new URLSearchParams(l.types.map((t) => ['type', t]))
  try {
    const response = await openStream('tail?' + q, l.stop.signal)
    l.error = null
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader()
    let rest = ''
    for (;;) {
      const { value, done } = await reader.read()
      if (done) return
      const lines = (rest + value).split('\n')
      rest = lines.pop()
      take(ctx, lines.filter(Boolean).map((line) => JSON.parse(line)))
    }
  } catch (err) {
    if (err instanceof ApiError) l.error = err.status === 0 || err.status === 401 ? null : err
    else if (err.name !== 'AbortError' && !(err instanceof TypeError)) throw err // a TypeError is a connection that broke
  }
}

function take(ctx, lines) {
  const l = ctx.local
  for (const line of lines) {
    if (line.skipped) l.skipped += line.skipped
    if (line.error) l.error = { message: line.error, hint: line.hint }
    if (line.waiting !== undefined) l.away = line.waiting
    if (line.sequence === undefined) continue
    l.waiting.push(line)
    if (l.seen.size < mostTypes) l.seen.add(line.type)
  }
  if (l.waiting.length > most) l.skipped += l.waiting.splice(0, l.waiting.length - most).length
  if (!l.timer && !l.paused) l.timer = setTimeout(() => show(ctx), 200)
}

function show(ctx) {
  const l = ctx.local
  l.timer = 0
  l.events = [...l.waiting.reverse(), ...l.events].slice(0, most)
  l.waiting = []
  ctx.redraw()
}

function pause(ctx) {
  const l = ctx.local
  l.paused = !l.paused
  if (!l.paused) show(ctx)
  ctx.redraw()
}

function filter(ctx, text) {
  Object.assign(ctx.local, { types: text.split(/[\s,]+/).filter(Boolean), events: [], waiting: [], skipped: 0 })
  ctx.local.stop?.abort()
  ctx.redraw()
  ctx.reload()
}

export default {
  id: 'tail', title: 'Live tail', letter: 't', every: 1000, early: true,
  keys: { p: { does: 'pause and go on', run: pause } },
  enter(ctx) {
    Object.assign(ctx.local, { types: [], events: [], waiting: [], seen: new Set(), skipped: 0, paused: false })
    ctx.local.hide = () => document.hidden && ctx.local.stop?.abort()
    document.addEventListener('visibilitychange', ctx.local.hide)
  },
  leave({ local: l }) {
    document.removeEventListener('visibilitychange', l.hide)
    clearTimeout(l.timer)
    l.stop?.abort()
  },
  load: (ctx) => follow(ctx),
  tools: (ctx) => [
    h('span', { class: 'hint' }, ctx.local.skipped > 0 && `${number(ctx.local.skipped)} skipped`,
      ctx.local.paused && ` ${number(ctx.local.waiting.length)} new`),
    button(ctx.local.paused ? 'Go on' : 'Pause', () => pause(ctx), { 'aria-pressed': String(ctx.local.paused), 'aria-keyshortcuts': 'p' }),
    button('Clear', () => (Object.assign(ctx.local, { events: [], skipped: 0 }), ctx.redraw())),
  ],
  draw(ctx) {
    const l = ctx.local
    const submit = (e) => {
      e.preventDefault()
      filter(ctx, new FormData(e.currentTarget).get('types'))
    }
    return [
      h('form', { class: 'bar filters', onsubmit: submit },
        h('input', { type: 'search', name: 'types', list: 'types', placeholder: 'Event types: order.placed', 'aria-label': 'Event types', autocomplete: 'off', spellcheck: 'false' }),
        h('datalist', { id: 'types' }, [...l.seen].sort().map((t) => h('option', { value: t, key: t }))),
        h('button', { type: 'submit' }, 'Filter')),
      l.error && problem(l.error),
      l.away && notice('warn', 'The tail waits for JetStream', data(l.away, 'wrap')),
      ctx.overview && !ctx.overview.shows_payloads && h('p', { class: 'hint' }, visible(ctx.overview.payload_hint)),
      l.events.length ? panel(count(l.events.length, 'event'), l.types.length > 0 && data('of ' + l.types.join(', ')), table(columns, l.events, { label: 'Events', key: (e) => e.sequence, open: (e) => open(ctx, e) }))
        : empty('No events yet.', 'Each event appears here when it is stored in the stream. Those from before are in `walpost tail --since 1h`.'),
    ]
  },
}
