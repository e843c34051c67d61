// Alarms: what the relay has raised since its start.
import { data, h } from '../dom.js'
import { count, number } from '../format.js'
import { badge, empty, panel, table, time } from '../widgets.js'

export const alarmLevel = (a) => (!a.active ? 'idle' : a.severity === 'critical' ? 'bad' : 'warn')

export const runbook = (a, text) => h('a', { href: a.runbook, target: '_blank', rel: 'noreferrer' }, text)

const columns = [
  { name: 'State', cls: 'c-short', cell: (a) => badge(alarmLevel(a), a.active ? a.severity : 'over') },
  { name: 'Alarm', cls: 'c-name', cell: (a) => data(a.alarm, 'strong') },
  { name: 'What it says', cls: 'c-long', cell: (a) => data(a.summary, 'wrap') },
  { name: 'Raised', cls: 'c-num p2', cell: (a) => count(a.count, 'time') },
  { name: 'Last', cls: 'c-time p2', cell: (a) => time(a.last_at) },
  { name: 'What to do', cls: 'c-act', cell: (a) => runbook(a, 'Runbook') },
]

export default {
  id: 'alarms', title: 'Alarms', letter: 'a',
  draw({ alarms }) {
    if (!alarms) return empty('Not known.', 'The relay could not be asked.')
    if (!alarms.length) {
      return empty('No alarms.', 'None has been raised since the relay started. An alarm is what an operator should look at, such as another relay that writes to the stream.')
    }
    const active = alarms.filter((a) => a.active).length
    return panel(`${number(active)} active, ${number(alarms.length - active)} over`, null,
      table(columns, alarms, { label: 'Alarms', key: (a) => a.alarm }))
  },
}
