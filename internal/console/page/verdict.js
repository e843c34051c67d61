// What the relay does, in one word, and what is wrong, in one sentence.
import { count, seconds, secondsSince, walBytes } from './format.js'

const states = {
  streaming: ['good', 'Streaming', 'reads the WAL'],
  polling: ['warn', 'Polling', 'searches the tables'],
  standby: ['idle', 'Standby', 'another relay holds the lock'],
  waiting: ['bad', 'Waiting', 'delivers nothing now'],
  starting: ['idle', 'Starting', ''],
  stopped: ['bad', 'Stopped', ''],
  none: ['bad', 'No relay', 'nobody holds the lock'],
  unknown: ['idle', 'Not known', ''],
}

// relayState is {level, name, does, since}. Where the relay cannot be asked, PostgreSQL tells by the lock.
export function relayState(o) {
  const lock = o?.status?.relay
  const by = { stream: 'streaming', poll: 'polling', none: 'none' }[lock?.mode] ?? 'unknown'
  const id = o?.relay?.state ?? by
  const [level, name, does] = states[id] ?? states.unknown
  return { id, level, name, does, since: o?.relay?.since ?? lock?.lock?.connected_since ?? null }
}

const sum = (all, field) => all.reduce((n, x) => (x[field] === null || x[field] === undefined ? n : (n ?? 0) + x[field]), null)

// totals are those of all outboxes.
export function totals(o) {
  const all = o?.status?.outboxes ?? []
  const ages = all.map((x) => x.oldest_due_age_seconds).filter((x) => x !== null && x !== undefined)
  return {
    pending: sum(all, 'pending'), parked: sum(all, 'parked'), held: sum(all, 'held'),
    lag: ages.length ? Math.max(...ages) : null, limit: o?.status?.count_limit,
  }
}

function waiting(o) {
  const { pending, limit } = totals(o)
  if (pending === null) return ''
  return ` ${count(pending, 'row waits', 'rows wait', limit)}.`
}

// soon: a forecast of more than a week says nothing.
export const soon = (s) => s > 0 && s < 7 * 86400

// kept says why nothing is lost, and for how long that holds.
function kept(o, series) {
  const full = series?.forecast?.full_in_seconds
  return ' Nothing is lost: PostgreSQL keeps the WAL' +
    (soon(full) ? `, within its budget for ${seconds(full)} more.` : '.')
}

const lasts = (o) => (o.relay?.since ? ` for ${seconds(secondsSince(o.relay.since))}` : '')

// retained is the WAL that the slot keeps, as in its chart. Where that has no newest point, PostgreSQL tells.
export const retained = (o, series) => series?.retained_bytes.at(-1) ?? o?.status?.slot?.retained_bytes

// verdict is the worst thing, {level, text, more}, or null where all is well. more is the servers' own text.
export function verdict(o, series, alarms) {
  if (!o) return null
  const failed = (server) => o.status?.errors?.find((e) => e.server === server)
  const { id } = relayState(o)
  const pg = failed('postgres'), nats = failed('nats')
  if (pg) return { level: 'bad', text: 'PostgreSQL cannot be asked. Rows that are committed stay in its WAL.', more: pg.error }
  if (id === 'none') return { level: 'bad', text: `No relay runs.${waiting(o)}${kept(o, series)}`, more: 'start one: walpost run' }
  if (nats) {
    return { level: 'bad', text: `JetStream ${id === 'waiting' ? 'has been away' + lasts(o) : 'is away'}.${waiting(o)}${kept(o, series)}`, more: nats.error }
  }
  if (stuck(o, id)) {
    return { level: 'bad', text: `The relay has delivered nothing${lasts(o)}.${waiting(o)}${kept(o, series)}`, more: o.relay?.last_error || o.relay?.step }
  }
  return slotTrouble(o, series) ?? alarmed(alarms) ?? late(o) ?? polls(o, id)
}

// stuck: a session's end and the next one's start take a moment, which is nothing to report.
const stuck = (o, id) => id === 'stopped' || (id === 'starting' && o.relay?.last_error) || (id === 'waiting' && secondsSince(o.relay.since) > 3)

function slotTrouble(o, series) {
  const slot = o.status?.slot
  if (slot?.exists && slot.wal_status === 'lost') return { level: 'bad', text: 'The slot is lost: PostgreSQL has removed its WAL.', more: slot.invalidation_reason }
  const full = series?.forecast?.full_in_seconds
  if (full > 0 && full < 86400) {
    return { level: full < 3600 ? 'bad' : 'warn', text: `The slot's WAL reaches its budget in ${seconds(full)}.`,
      more: `${walBytes(retained(o, series))} are kept, and ${walBytes(series.forecast.growth_bytes_per_second)}/s are added` }
  }
  return null
}

function alarmed(alarms) {
  const now = (alarms ?? []).filter((a) => a.active)
  const worst = now.find((a) => a.severity === 'critical') ?? now[0]
  if (!worst) return null
  const others = now.length > 1 ? `, and ${count(now.length - 1, 'other alarm')}` : ''
  return { level: worst.severity === 'critical' ? 'bad' : 'warn', text: `Alarm ${worst.alarm}${others}.`, more: worst.summary, see: { id: 'alarms', title: 'Alarms' } }
}

function late(o) {
  const { lag, parked, held, limit } = totals(o)
  if (!(lag > 60)) return null
  const text = `The oldest row has waited for ${seconds(lag)}.`
  if (!parked) return { level: 'warn', text: text + waiting(o), more: '' }
  const behind = held > 0 ? `, and ${count(held, 'row waits', 'rows wait', limit)} behind` : ''
  return { level: 'warn', text: `${text} ${count(parked, 'row', 'rows', limit)} cannot be sent${behind}. Nothing is lost.`,
    more: o.parked_error, see: { id: 'held', title: 'Held aggregates' } }
}

function polls(o, id) {
  if (id !== 'polling') return null
  return { level: 'warn', text: 'The relay polls: it searches the tables instead of reading the WAL.', more: o.relay?.step || o.relay?.last_error }
}
