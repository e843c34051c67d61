// Doctor: checks both servers, when asked to.
import { get } from '../api.js'
import { data, h } from '../dom.js'
import { ago, count } from '../format.js'
import { badge, button, copy, empty, icon, problem } from '../widgets.js'

const levels = { error: ['bad', 'error'], warn: ['warn', 'warning'], info: ['idle', 'note'] }

async function run(ctx) {
  const l = ctx.local
  Object.assign(l, { running: true, error: null })
  ctx.redraw()
  try {
    l.findings = (await get('doctor')).findings ?? []
    l.at = new Date().toISOString()
  } catch (err) {
    l.error = err
  }
  l.running = false
  ctx.redraw()
}

function summary(found, at) {
  const n = (level) => found.filter((f) => f.level === level).length
  return h('p', { class: 'summary' }, icon(n('error') ? 'bad' : n('warn') ? 'warn' : 'good'),
    ` ${count(n('error'), 'error')}, ${count(n('warn'), 'warning')}, ${count(n('info'), 'note')} · checked ${ago(at)}`)
}

const finding = (f) => h('li', { class: 'panel finding', key: f.code + f.text },
  h('div', {}, badge(...(levels[f.level] ?? levels.info)), ' ', h('code', {}, data(f.code))), h('p', {}, data(f.text, 'wrap')),
  f.fix && h('div', { class: 'fix' }, h('span', { class: 'hint' }, 'Fix'), h('code', {}, data(f.fix, 'wrap')),
    copy(f.fix, { class: 'plain', 'aria-label': `Copy the fix of ${f.code}` })))

export default {
  id: 'doctor', title: 'Doctor', letter: 'x',
  tools: (ctx) => button(ctx.local.running ? 'Checking …' : 'Check both servers', () => run(ctx), { class: 'primary', disabled: ctx.local.running }),
  draw(ctx) {
    const l = ctx.local
    if (l.error) return problem(l.error)
    if (!l.findings) return empty('Nothing has been checked yet.', 'The doctor checks PostgreSQL, NATS and what lies between. It changes nothing.')
    return [summary(l.findings, l.at), h('ul', { class: 'findings' }, l.findings.map(finding))]
  },
}
