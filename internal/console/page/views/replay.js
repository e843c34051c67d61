// Replay: delivered rows are published again, on purpose.
import { get, post } from '../api.js'
import { confirmed, details, toast } from '../dialog.js'
import { data, h } from '../dom.js'
import { count, number, plural, serverNow } from '../format.js'
import { action, badge, empty, facts, field, meter, moment, notice, panel, problem, readOnly, table, time } from '../widgets.js'

const list = (text) => text.split(/[\s,]+/).filter(Boolean)

const lengths = { s: 1, m: 60, h: 3600, d: 86400 }

// instant is a time as it is typed, or how long ago it was.
function instant(text, now) {
  const [, n, unit] = /^(\d+)\s*([smhd])$/.exec(text ?? '') ?? []
  return n ? new Date(Date.parse(now) - n * lengths[unit] * 1000).toISOString() : text
}

// choice is what the form asks for; what is left empty is not in it. Rows that are delivered after the count are
// not meant: it would never be right.
function choice(form, now) {
  const typed = new FormData(form), text = (name) => typed.get(name)?.trim() || undefined
  return {
    outbox: text('outbox'), event_types: text('types') && list(text('types')), ids: text('ids') && list(text('ids')),
    aggregate: text('aggregate'), since: instant(text('since'), now), until: instant(text('until'), now) ?? now,
  }
}

async function preview(ctx, e) {
  e.preventDefault()
  const l = ctx.local, wanted = choice(e.currentTarget, serverNow())
  Object.assign(l, { wanted, counts: null, error: null, counting: true })
  ctx.redraw()
  try {
    l.counts = await post('replay/preview', wanted)
  } catch (err) {
    l.error = err
  }
  l.counting = false
  ctx.redraw()
}

const rowsOf = ({ total }) => (total === null ? 'rows that could not be counted' : count(total, 'row'))

async function request(ctx) {
  const l = ctx.local, rows = rowsOf(l.counts)
  const yes = await confirmed(`Publish ${rows} again?`, [
    counted(l.counts), h('p', {}, 'Consumers get these events once more, each with an id that ends in /replay-n.'),
  ], `Publish ${rows} again`)
  if (!yes) return
  try {
    const { replay_id } = await post('replay', { ...l.wanted, expected_total: l.counts.total })
    l.counts = null
    toast(`Replay ${replay_id} is requested. The relay works on it.`)
    ctx.reload()
  } catch (err) {
    l.error = err
    ctx.redraw()
  }
}

const shown = 20 // event types

function counted({ total, by_type: types }) {
  const by_type = types ?? []
  const most = Math.max(1, ...by_type.map((t) => t.rows))
  return h('div', { class: 'bars' },
    by_type.slice(0, shown).map((t) => h('div', {}, data(t.event_type), meter(t.rows, most, 'plain', `Rows of the type`), h('b', {}, number(t.rows)))),
    by_type.length > shown && h('p', { class: 'hint' }, `and ${count(by_type.length - shown, 'more type')}`),
    total === 0 && h('p', {}, 'No delivered row fits.'))
}

function form(ctx) {
  const l = ctx.local, outboxes = ctx.overview?.status?.outboxes ?? []
  return h('form', { class: 'fields', onsubmit: (e) => preview(ctx, e), oninput: () => l.counts && (l.counts = null, ctx.redraw()) },
    h('label', { class: 'field' }, h('span', {}, 'Outbox'), h('select', { name: 'outbox' }, outboxes.map((o) => h('option', { value: o.table, key: o.table }, o.table)))),
    field('Event types', { name: 'types', placeholder: 'order.placed, order.paid' }, 'All, if empty'),
    field('Aggregate', { name: 'aggregate', placeholder: 'order or order/42' }, 'A type, or one aggregate'),
    field('Delivered since', { name: 'since', placeholder: '2026-01-31T12:00:00Z or 72h' }, 'A time, or how long ago'),
    field('Until', { name: 'until', placeholder: 'now' }, 'A time, or how long ago'),
    field('Row ids', { name: 'ids', placeholder: '4711, 4712' }, 'Only these rows'),
    h('footer', {}, h('button', { type: 'submit', disabled: l.counting || !ctx.overview?.can_change }, l.counting ? 'Counting …' : 'Count the rows'),
      h('span', { class: 'hint' }, 'Nothing is published yet.'), readOnly(ctx)))
}

const levels = { done: 'good', running: 'idle', requested: 'idle', failed: 'bad', cancelled: 'warn' }
const runs = (r) => ['requested', 'running'].includes(r.state)

async function cancel(ctx, r) {
  const id = r.id ?? r.replay_id
  if (!(await confirmed(`Cancel replay ${id}?`, h('p', {}, r.sent > 0 ? `${count(r.sent, 'row of it is', 'rows of it are')} published already, and ${plural(r.sent, 'stays', 'stay')}.` : 'No row of it is published yet.'), 'Cancel the replay', true))) return
  try {
    await post(`replays/${id}/cancel`, {})
    toast(`Replay ${id} is cancelled.`)
  } catch (err) {
    toast(err.message, true)
  }
  ctx.reload()
}

const progress = (r) => [
  r.total > 0 && meter(r.sent + (r.refused ?? 0), r.total, 'plain', `Progress of replay ${r.id}`),
  `${number(r.sent)} of ${number(r.total)}`, r.refused > 0 && `, ${number(r.refused)} refused`,
]

const chosen = (r) => [...(r.event_types ?? []), ...(r.ids ?? []).map((id) => 'row ' + id), r.aggregate_type && `${r.aggregate_type}/${r.aggregate_id ?? '*'}`]

const open = (r) => details(`Replay ${r.id ?? r.replay_id}`, () => facts([
  ['State', r.state], ['Outbox', r.outbox], ['Rows', chosen(r).filter(Boolean).join(', ') || 'all delivered'],
  ['Since', moment(r.since)], ['Until', moment(r.until)], ['Progress', progress(r)], ['Into', r.to_stream ?? "the relay's stream"],
  ['Requested', moment(r.requested_at)], ['By', r.requested_by], ['Started', moment(r.started_at)], ['Finished', moment(r.finished_at)],
  ['Note', r.last_error],
]))

const columns = (ctx) => [
  { name: 'Id', cls: 'c-id', cell: (r) => r.id ?? r.replay_id },
  { name: 'State', cls: 'c-short', cell: (r) => badge(levels[r.state] ?? 'idle', data(r.state)) },
  { name: 'Outbox', cls: 'c-name p2', cell: (r) => data(r.outbox) },
  { name: 'Progress', cls: 'c-wide', cell: progress },
  { name: 'Requested', cls: 'c-time p2', cell: (r) => time(r.requested_at) },
  { name: 'By', cls: 'c-short p3', cell: (r) => data(r.requested_by) },
  { name: 'Note', cls: 'c-name p3', cell: (r) => data(r.last_error) },
  { name: '', cls: 'c-act', cell: (r) => runs(r) && action(ctx, 'Cancel', () => cancel(ctx, r)) },
]

export default {
  id: 'replay', title: 'Replay', letter: 'r', every: 2000,
  load: () => get('replays'),
  draw(ctx) {
    const l = ctx.local, all = ctx.data.replays
    return [
      panel('Publish delivered rows again', null, form(ctx), l.error && problem(l.error),
        l.counts && h('div', { class: 'result' }, h('h3', {}, `${rowsOf(l.counts)} would be published again`),
          l.counts.warning && notice('warn', data(l.counts.warning, 'wrap')), counted(l.counts),
          action(ctx, `Publish ${rowsOf(l.counts)} again …`, () => request(ctx), { class: 'primary', disabled: l.counts.total === 0 }))),
      panel('Requests', null, all.length ? table(columns(ctx), all, { label: 'Requests', key: (r) => r.id ?? r.replay_id, open })
        : empty('No replay has been requested.', 'A request and its progress would be here.')),
    ]
  },
}
