// Doctor: checks both servers, when asked to.
import { get } from '../api.js'
import { data, h } from '../dom.js'
import { ago, clock, count, serverNow } from '../format.js'
import { badge, button, empty, fix, icon, problem } from '../widgets.js'

const levels = { error: ['bad', 'error'], warn: ['warn', 'warning'], info: ['idle', 'note'] }

// last is the last check. It stays while the page is open, whichever view is shown.
const last = { findings: null, at: null, error: null, running: false }

async function run(ctx) {
  Object.assign(last, { running: true, error: null })
  ctx.redraw()
  try {
    const { findings } = await get('doctor')
    Object.assign(last, { findings: findings ?? [], at: serverNow() })
  } catch (err) {
    last.error = err
  }
  last.running = false
  ctx.redraw()
}

function summary({ findings: found, at }) {
  const n = (level) => found.filter((f) => f.level === level).length
  return h('p', { class: 'summary' }, icon(n('error') ? 'bad' : n('warn') ? 'warn' : 'good'),
    ` ${count(n('error'), 'error')}, ${count(n('warn'), 'warning')}, ${count(n('info'), 'note')} · checked at ${clock(at)} UTC, ${ago(at)}`)
}

// command is a fix that is one as a whole, without its quotes; null is a sentence.
export function command(text) {
  const bare = text.replace(/^`([^`]*)`$/, '$1')
  const mixed = /`|\.\.\.|[:;,] (or|and|see) |\(RDS/.test(bare)
  return !mixed && /^(ALTER|CREATE|DROP|GRANT|REVOKE|walpost|nats) /.test(bare) ? bare : null
}

const finding = (f) => h('li', { class: 'panel finding', key: f.code + f.text },
  h('div', {}, badge(...(levels[f.level] ?? levels.info)), ' ', h('code', {}, data(f.code))), h('p', {}, data(f.text, 'wrap')),
  f.fix && fix('Fix', command(f.fix) ?? f.fix, command(f.fix) !== null, `the fix of ${f.code}`))

export default {
  id: 'doctor', title: 'Doctor', letter: 'x',
  tools: (ctx) => button(last.running ? 'Checking …' : 'Check both servers', () => run(ctx), { class: 'primary', disabled: last.running }),
  draw: () => [
    last.error && problem(last.error),
    last.findings ? [summary(last), h('ul', { class: 'findings' }, last.findings.map(finding))]
      : !last.error && empty('Nothing has been checked yet.', 'The doctor checks PostgreSQL, NATS and what lies between. It changes nothing.'),
  ],
}
