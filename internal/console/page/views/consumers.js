// Consumers: who consumes, and how far behind each is.
import { get } from '../api.js'
import { details } from '../dialog.js'
import { data, h } from '../dom.js'
import { count, number } from '../format.js'
import { badge, empty, facts, panel, problem, table, time } from '../widgets.js'

const position = (c) => Math.min(...c.partitions.map((p) => p.sequence))
const behind = (c, sequence) => (c.stream_last_sequence === null || c.stream_last_sequence === undefined ? null : Math.max(0, c.stream_last_sequence - sequence))
const owned = (c) => c.partitions.filter((p) => p.owner).length

function health(c) {
  if (!c.processes) return badge('bad', 'does not run')
  if (owned(c) < c.partitions.length) return badge('warn', 'partitions without an owner')
  return c.dead_letters > 0 ? badge('warn', 'failed events') : badge('good', 'runs')
}

const columns = [
  { name: 'Consumer', cls: 'c-name', cell: (c) => data(c.consumer) },
  { name: 'State', cls: 'c-name', cell: health },
  { name: 'Stream', cls: 'c-short p2', cell: (c) => data(c.stream) },
  { name: 'Processes', cls: 'c-num p2', cell: (c) => number(c.processes) },
  { name: 'Partitions', cls: 'c-num p3', cell: (c) => `${owned(c)} of ${c.partitions.length}` },
  { name: 'Sequence', cls: 'c-num p2', cell: (c) => number(position(c)) },
  { name: 'Behind', cls: 'c-num', cell: (c) => number(behind(c, position(c))) },
  { name: 'Parked', cls: 'c-num p3', cell: (c) => number(c.parked) },
  { name: 'Dead letters', cls: 'c-num p2', cell: (c) => number(c.dead_letters) },
]

const partitions = (c) => [
  { name: 'Partition', cls: 'c-num', cell: (p) => p.partition },
  { name: 'Sequence', cls: 'c-num', cell: (p) => number(p.sequence) },
  { name: 'Behind', cls: 'c-num', cell: (p) => number(behind(c, p.sequence)) },
  { name: 'Moved', cls: 'c-time p2', cell: (p) => time(p.at) },
  { name: 'Owner', cls: 'c-long', cell: (p) => data(p.owner) },
]

const open = (c) => details(data(c.consumer), () => [
  facts([['Stream', c.stream], ['Filters', (c.filters ?? []).join(', ') || 'every subject'], ['Start', c.start], ['Processes', number(c.processes)],
    ['Parked', number(c.parked)], ['Dead letters', number(c.dead_letters)]]),
  table(partitions(c), c.partitions, { label: 'Partitions', key: (p) => p.partition }),
  h('p', { class: 'hint' }, 'walpost consumers rewind and walpost consumers dlq change them.'),
])

export default {
  id: 'consumers', title: 'Consumers', letter: 'c', every: 5000,
  load: () => get('consumers'),
  draw({ data: d }) {
    const all = d.consumers ?? []
    if (d.error) return problem({ message: d.error, hint: d.hint })
    if (!all.length) return empty('No consumers here.', 'Consumers that use the Go package consume, or its SQL functions from another language, keep their positions in tables of their database. This one has none' + (d.hint ? `: ${d.hint}.` : '.'))
    return panel(count(all.length, 'consumer'), null, table(columns, all, { label: 'Consumers', key: (c) => c.consumer, open }))
  },
}
