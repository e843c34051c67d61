// Held aggregates: those with a row that failed, and the rows behind it.
import { get } from '../api.js'
import { details } from '../dialog.js'
import { data, h } from '../dom.js'
import { clock, count, number, seconds, secondsUntil } from '../format.js'
import { empty, facts, fix, moment, panel, table, time } from '../widgets.js'

const name = (a) => [a.tenant_id && [data(a.tenant_id), ' · '], data(a.aggregate_type), '/', data(a.aggregate_id)]

const columns = [
  { name: 'Aggregate', cls: 'c-name', cell: name },
  { name: 'Rows', cls: 'c-num', cell: (a) => number(a.rows) },
  { name: 'Failed event', cls: 'c-name p2', cell: (a) => data(a.event_type) },
  { name: 'Error', cls: 'c-long', cell: (a) => data(a.error) },
  { name: 'Since', cls: 'c-time', cell: (a) => time(a.since) },
  { name: 'Tries', cls: 'c-num p2', cell: (a) => number(a.attempts) },
  { name: 'Next try', cls: 'c-time p3', cell: (a) => next(a.retry_at) },
]

// next is when the row is tried again.
const next = (at) => (!at ? '–' : secondsUntil(at) > 0 ? h('time', { datetime: at, title: at }, 'in ' + seconds(secondsUntil(at))) : 'now')

const plain = /^\w[\w.:-]*$/ // a shell takes it as it is

// giveUp is the command that ends the tries of a row.
function giveUp(a, outboxes) {
  if (!plain.test(a.parked_id ?? '')) return null
  const which = outboxes > 1 ? ` --outbox '${a.outbox.replaceAll("'", "'\\''")}'` : ''
  return [h('p', { class: 'hint' }, 'To go on without the row: it is tried once more, and becomes a dead letter if that fails.'),
    fix('Run', `walpost dlq give-up ${a.parked_id}${which}`, true, 'the command')]
}

const open = (ctx) => (a) => details(name(a), () => [facts([
  ['Error', a.error], a.what_helps && ['What helps', a.what_helps], ['Outbox', a.outbox], ['Tenant', a.tenant_id], ['Aggregate type', a.aggregate_type], ['Aggregate id', a.aggregate_id],
  ['Rows that wait', number(a.rows)], ['Failed row', a.parked_id], ['Its event type', a.event_type], ['Failed since', moment(a.since)],
  ['Tries', number(a.attempts)], ['Next try', [a.retry_at && clock(a.retry_at) + ' · ', next(a.retry_at)]],
]), giveUp(a, ctx.overview?.status?.outboxes?.length)])

export default {
  id: 'held', title: 'Held aggregates', letter: 'h', every: 5000,
  load: () => get('held?limit=200'),
  draw(ctx) {
    const d = ctx.data
    if (!d.aggregates.length) {
      return empty('No aggregate is held.', 'If a row fails, the later rows of its aggregate wait here until it is delivered or becomes a dead letter.')
    }
    return panel(count(d.total, 'aggregate', 'aggregates', d.limit_reached && d.total), d.aggregates.length < d.total && `the ${number(d.aggregates.length)} with the most rows`,
      table(columns, d.aggregates, { label: 'Held aggregates', open: open(ctx), key: (a) => JSON.stringify([a.outbox, a.tenant_id, a.aggregate_type, a.aggregate_id]) }))
  },
}
