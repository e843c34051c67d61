// Slot: what PostgreSQL keeps for the relay, and where it goes.
import { charts, lastOf, retainedWAL } from '../charts.js'
import { data, h } from '../dom.js'
import { atLeast, bytes, count, number, seconds, walBytes, walSteps } from '../format.js'
import { relayState, retained, soon } from '../verdict.js'
import { badge, empty, facts, meter, moment, notice, panel, table } from '../widgets.js'

const specs = [
  retainedWAL,
  { title: 'WAL behind the confirmed LSN', format: walBytes, steps: walSteps,
    lines: [{ field: 'confirmed_lag_bytes', name: '', color: 'line1', fill: true }] },
]

const process = (p) => p && [
  data(p.application_name || 'process'), ` · pid ${p.pid} · role `, data(p.user),
  p.client_address && [' · ', data(p.client_address)],
]

const health = { reserved: 'good', extended: 'good', unreserved: 'bad', lost: 'bad' }

function slotFacts(slot, ctx) {
  if (!slot) return empty('Not known.', 'PostgreSQL could not be asked.')
  if (!slot.exists) return empty(`Slot ${slot.name} does not exist.`, 'The relay creates it at its first start. In poll mode there is none.')
  const budget = lastOf(ctx.series?.budget_bytes), full = ctx.series?.forecast?.full_in_seconds
  const wal = retained(ctx.overview, ctx.series)
  const level = wal > budget * 0.8 ? 'bad' : 'good'
  const kept = [walBytes(wal),
    budget > 0 && [` of ${walBytes(budget)}`, meter(wal, budget, level, 'Kept WAL of its budget')]]
  const traits = ['temporary', 'failover', 'two_phase', 'synced'].filter((k) => slot[k])
  return facts([
    ['Name', slot.name],
    ['WAL', badge(health[slot.wal_status] ?? 'idle', slot.wal_status || 'not known')],
    ['Kept', kept],
    ['Full in', soon(full) ? seconds(full) : 'not soon'],
    ['Until it is lost', slot.safe_bytes >= 0 ? walBytes(slot.safe_bytes) : 'no limit of the server'],
    ['Confirmed LSN', slot.confirmed_flush_lsn],
    ['Behind it', walBytes(ctx.series?.confirmed_lag_bytes.at(-1) ?? slot.confirmed_lag_bytes)],
    ['Restart LSN', slot.restart_lsn],
    ['In use by', process(slot.walsender) ?? (slot.active_pid ? `process ${slot.active_pid}` : 'nothing')],
    ['Kind', [slot.plugin || slot.type, ...traits].join(', ')],
    slot.invalidation_reason && ['Invalidated', slot.invalidation_reason],
  ])
}

function relayFacts({ overview: o }) {
  const lock = o.status.relay?.lock, own = o.relay, state = relayState(o)
  return [
    facts([
      ['State', badge(state.level, state.name)],
      own && ['Since', moment(own.since)],
      own?.step && ['Step', own.step],
      own?.last_error && ['Last error', own.last_error],
      own && ['In flight', count(own.inflight_messages, 'message')],
      own && ['Not settled', count(own.unsettled_rows, 'row')],
      ['Lock held by', lock ? process(lock) : 'nobody'],
      lock && ['Connected', moment(lock.connected_since)],
      ['Standing by', number(o.status.relay?.standing_by)],
    ]),
    o.relay_error && notice('warn', 'The relay cannot be asked', data(o.relay_error, 'wrap')),
  ]
}

const stream = (s) => (!s ? empty('Not known.', 'JetStream could not be asked.')
  : !s.exists ? empty(`Stream ${s.name} does not exist.`, 'The relay creates it at its first start.')
    : facts([
      ['Name', s.name], ['Messages', number(s.messages)], ['Size', bytes(s.bytes)],
      ['Sequences', `${number(s.first_sequence)} to ${number(s.last_sequence)}`],
      ['Last message', moment(s.last_message_at)], ['Created', moment(s.created_at)],
      ['Replicas', [number(s.replicas), s.leader && [', led by ', data(s.leader)]]],
      ['Duplicate window', seconds(s.duplicate_window_seconds)], ['Batches', (s.batches ?? []).join(', ') || 'none'],
    ]))

const columns = (limit) => [
  { name: 'Outbox', cls: 'c-wide', cell: (o) => data(o.table) },
  { name: 'Mark', cls: 'c-short p2', cell: (o) => data(typeof o.mark === 'string' ? o.mark : 'set') },
  { name: 'Pending', cls: 'c-num', cell: (o) => atLeast(o.pending, limit) },
  { name: 'Oldest due', cls: 'c-num', cell: (o) => seconds(o.oldest_due_age_seconds) },
  { name: 'Parked', cls: 'c-num p2', cell: (o) => atLeast(o.parked, limit) },
  { name: 'Held', cls: 'c-num p2', cell: (o) => atLeast(o.held, limit) },
  { name: 'Settled up to id', cls: 'c-time p3', cell: (o) => (o.progress ? `${number(o.progress.settled_to)} of ${number(o.progress.settled_to + o.progress.behind)}` : '–') },
]

export default {
  id: 'slot', title: 'Slot', letter: 's',
  enter: (ctx) => (ctx.local.charts = charts(specs)),
  theme: (ctx) => ctx.local.charts.theme(),
  tools: (ctx) => ctx.local.charts.choice(ctx.redraw),
  draw(ctx) {
    const s = ctx.overview?.status
    if (!s) return h('p', { class: 'loading' }, 'Loading …')
    if (ctx.series) queueMicrotask(() => ctx.local.charts.update(ctx.series))
    return [
      (s.unread ?? []).map((u) => notice('warn', data(`${u.part}: ${u.error}`, 'wrap'), data(u.hint, 'wrap'))),
      h('div', { class: 'columns three' },
        panel('Replication slot', null, slotFacts(s.slot, ctx), s.new_slot && notice('warn', 'A new slot is being made', data(s.new_slot.name))),
        panel('Stream', null, stream(s.stream)),
        panel('Relay', null, relayFacts(ctx))),
      ctx.local.charts.node,
      panel('Outboxes', null, table(columns(s.count_limit), s.outboxes ?? [], { label: 'Outboxes', key: (o) => o.table })),
    ]
  },
}
