// Overview: is all well, and how has it been?
import { charts, lastOf, retainedWAL } from '../charts.js'
import { details } from '../dialog.js'
import { data, h } from '../dom.js'
import { atLeast, clock, count, countSteps, milliseconds, millisecondSteps, number, plural, rate, seconds, secondsSince, secondSteps, short, walBytes } from '../format.js'
import { relayState, retained, soon, totals } from '../verdict.js'
import { badge, empty, facts, icon, meter, moment, panel, table, time } from '../widgets.js'
import { alarmLevel, runbook } from './alarms.js'

const lines = [
  { title: 'Rate', format: rate, steps: countSteps, least: 10, lines: [
    { field: 'rate', name: 'stored', color: 'line1', fill: true }, { field: 'failures', name: 'failures', color: 'line3', dash: true }] },
  { title: 'Latency', format: milliseconds, steps: millisecondSteps, lines: [
    { field: 'p99_ms', name: 'p99', color: 'line2' }, { field: 'p50_ms', name: 'p50', color: 'line1', fill: true }] },
  { title: 'Lag', format: seconds, steps: secondSteps, lines: [{ field: 'lag_seconds', name: '', color: 'line1', fill: true }] },
  retainedWAL,
  { title: 'In flight', format: short, steps: countSteps, least: 10, lines: [{ field: 'inflight', name: '', color: 'line1', fill: true }] },
  { title: 'Failed', format: short, steps: countSteps, least: 10, lines: [
    { field: 'dead_letters', name: 'dead letters', color: 'line3', dash: true }, { field: 'held', name: 'held aggregates', color: 'line2' }] },
]

const tile = (label, value, below, level, href, more) =>
  h(href ? 'a' : 'div', { class: `tile ${level ?? ''}`, href, key: label },
    h('span', { class: 'label' }, label, level && icon(level)), h('span', { class: 'value' }, value), more,
    h('span', { class: 'below' }, below))

// units are small: 1 min 20 s.
const unit = (text) => text.match(/[\d.,]+|[^\d.,]+/g).map((part) => (/[a-z/]/i.test(part) ? h('small', {}, part) : part))

// walLevel tells how near the slot's WAL is to its budget.
const walLevel = (share, full) => (share > 0.8 ? 'bad' : share > 0.4 || (full > 0 && full < 86400) ? 'warn' : null)

function tiles({ overview: o, series }) {
  const t = totals(o), s = relayState(o), limit = o.status?.count_limit, letters = o.status?.dead_letters
  const standby = o.status?.relay?.standing_by
  const kept = retained(o, series)
  const budget = lastOf(series?.budget_bytes), full = series?.forecast?.full_in_seconds
  const wal = walLevel(budget ? kept / budget : 0, full)
  const p99 = lastOf(series?.p99_ms)
  return h('div', { class: 'tiles' },
    tile('Mode', s.name, [s.does, standby > 0 && ` · ${standby} standing by`], s.level, '#/slot'),
    tile('Rate', unit(rate(lastOf(series?.rate))), 'events stored'),
    tile('Lag', unit(seconds(t.lag ?? lastOf(series?.lag_seconds))), t.lag === 0 ? 'no row is due' : 'oldest due row',
      t.lag > 60 ? 'warn' : null),
    tile('Latency p50', unit(milliseconds(lastOf(series?.p50_ms))), `p99 ${milliseconds(p99)}`, p99 > 1000 ? 'warn' : null),
    tile('Backlog', atLeast(t.pending, limit), plural(t.pending, 'pending row')),
    tile('Failing rows', atLeast(t.parked, limit), t.parked === null ? 'not known' : t.parked + t.held === 0 ? 'none'
      : count(t.held, 'row waits behind', 'rows wait behind', limit), t.parked + t.held > 0 ? 'warn' : null, '#/held'),
    tile('Dead letters', atLeast(letters, limit), letters ? plural(letters, 'row that was given up', 'rows that were given up') : 'none', letters ? 'warn' : null, '#/dead-letters'),
    tile('Retained WAL', unit(walBytes(kept)), [budget ? `of ${walBytes(budget)}` : 'no budget', soon(full) && ` · full in ${seconds(full)}`],
      wal, '#/slot', budget && meter(kept, budget, wal ?? 'good', 'Retained WAL of its budget')))
}

const delivers = (relay) => relay.state === 'streaming' || relay.state === 'polling'

// lasted is how long a session went on.
const lasted = (relay) => (s) => (s.ended ? seconds((Date.parse(s.ended) - Date.parse(s.started)) / 1000)
  : badge(delivers(relay) ? 'good' : 'idle', seconds(secondsSince(s.started))))

// goesOn is what the present session does.
const goesOn = (relay) => [delivers(relay) ? 'it runs' : 'it delivers nothing now', relay.step, relay.last_error].filter(Boolean).join(': ')

const ending = (relay) => (s) => h('div', { class: 'wrap' }, s.ended
  ? [data(s.reason, 'strong'), s.attempts > 1 && ` ${number(s.attempts)} times`, s.error && [' ', data(s.error)]]
  : data(goesOn(relay), 'none'))

const columns = (relay) => [
  { name: 'Started', cls: 'c-time', cell: (s) => h('time', { datetime: s.started }, clock(s.started)) },
  { name: 'Lasted', cls: 'c-short', cell: lasted(relay) },
  { name: 'Mode', cls: 'c-short p3', cell: (s) => data(s.mode) },
  { name: 'Stored', cls: 'c-num p2', cell: (s) => number(s.stored) },
  { name: 'Ended because', cls: 'c-long', cell: ending(relay) },
]

const openSession = (relay) => (s) => details('Session', () => facts([
  ['Started', moment(s.started)], ['Delivered from', moment(s.delivering_since)], ['Ended', s.ended ? moment(s.ended) : goesOn(relay)],
  ['Mode', s.mode], ['Stored', count(s.stored, 'event')], ['Reason', s.reason], ['Error', s.error], s.hint && ['Hint', s.hint],
  s.attempts > 1 && ['Repeated', `${count(s.attempts, 'session')} in a row failed alike`],
]))

// sessions are of the same answer as the header's state.
function sessions({ overview: { relay, relay_error: failed } }) {
  const all = relay?.sessions ?? []
  return panel('Sessions', 'a failure ends one, and the next begins',
    all.length ? table(columns(relay), all, { label: 'Sessions', key: (s) => s.started, open: openSession(relay) })
      : empty('No sessions to show.', failed ?? 'The relay keeps its last 20 sessions.'))
}

const alarmColumns = [
  { name: 'Alarm', cls: 'c-wide', cell: (a) => h('div', { class: 'wrap' }, icon(alarmLevel(a)), ' ', runbook(a, data(a.alarm)), ' ', data(a.summary, 'none')) },
  { name: 'Last', cls: 'c-time', cell: (a) => time(a.last_at) },
]

function alarms(ctx) {
  const all = (ctx.alarms ?? []).slice(0, 8)
  return panel('Alarms', h('a', { href: '#/alarms' }, 'all'),
    all.length ? table(alarmColumns, all, { label: 'Alarms', key: (a) => a.alarm })
      : empty('No alarms.', 'None has been raised since the relay started.'))
}

export default {
  id: 'overview', title: 'Overview', letter: 'o',
  enter: (ctx) => (ctx.local.charts = charts(lines)),
  theme: (ctx) => ctx.local.charts.theme(),
  tools: (ctx) => [h('span', { class: 'hint' }, 'Times are UTC'), ctx.local.charts.choice(ctx.redraw)],
  draw(ctx) {
    if (!ctx.overview) return h('p', { class: 'loading' }, 'Loading …')
    if (ctx.series) queueMicrotask(() => ctx.local.charts.update(ctx.series)) // when they stand in the page
    return [tiles(ctx), ctx.local.charts.node,
      h('div', { class: 'columns' }, sessions(ctx), alarms(ctx))]
  },
}
