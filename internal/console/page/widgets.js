// The parts that views are made of.
import { data, h, visible } from './dom.js'
import { ago, clock } from './format.js'

const icons = { good: 'all is well', warn: 'warning', bad: 'critical', idle: 'idle' }

// icon tells a level without its colour.
export const icon = (level) => h('span', { class: `icon ${level}`, role: 'img', 'aria-label': icons[level] })

export const badge = (level, text) => h('span', { class: `badge ${level}` }, icon(level), text)

export const panel = (title, aside, ...children) =>
  h('section', { class: 'panel' }, h('header', {}, h('h2', {}, title), h('div', { class: 'aside' }, aside)), ...children)

export const empty = (title, text) =>
  h('div', { class: 'empty' }, h('strong', {}, title), h('p', {}, text))

// problem shows an error with its hint.
export const problem = (err) =>
  h('div', { class: 'notice bad', role: 'alert' }, icon('bad'),
    h('div', {}, h('strong', {}, data(err.message, 'wrap')), err.hint && h('p', {}, data(err.hint, 'wrap'))))

export const notice = (level, title, text) =>
  h('div', { class: `notice ${level}` }, icon(level), h('div', {}, h('strong', {}, title), text && h('p', {}, text)))

export const button = (text, onclick, props = {}) => h('button', { type: 'button', onclick, ...props }, text)

// copy needs a secure context, which a relay's console on another machine is not without TLS.
export const copy = (text, props) => navigator.clipboard && button('Copy', () => navigator.clipboard.writeText(text), props)

// fix is what to do, beside what it is for: a command that can be copied, or a sentence.
export const fix = (label, text, isCommand, what) => h('div', { class: 'fix' }, h('span', { class: 'hint' }, label),
  h(isCommand ? 'code' : 'span', { class: 'text' }, data(text, 'wrap')), isCommand && copy(text, { class: 'plain', 'aria-label': `Copy ${what}` }))

// action is a button that changes something. Where nothing may be changed it says what to configure.
export function action(ctx, text, onclick, props = {}) {
  const may = ctx.overview?.can_change
  return button(text, onclick, { ...props, disabled: !may || props.disabled, title: may ? props.title : ctx.overview?.change_hint })
}

// readOnly is the hint beside actions that are disabled.
export const readOnly = (ctx) => ctx.overview && !ctx.overview.can_change &&
  h('p', { class: 'hint' }, icon('idle'), h('span', {}, 'Read-only. ', visible(ctx.overview.change_hint ?? '')))

export const time = (at) =>
  at ? h('time', { datetime: at, title: visible(at) }, ago(at)) : h('span', { class: 'none' }, '–')

export const moment = (at) =>
  at ? h('time', { datetime: at, title: visible(at) }, clock(at), ' · ', ago(at)) : h('span', { class: 'none' }, '–')

// facts is a list of names and values.
export const facts = (pairs) =>
  h('dl', { class: 'facts' }, pairs.filter(Boolean).map(([name, value]) =>
    h('div', {}, h('dt', {}, name), h('dd', {}, value instanceof Node || Array.isArray(value) ? value : data(value, 'wrap')))))

export function meter(value, most, level, label) {
  const bar = h('meter', { class: level, min: 0, max: most || 1, 'aria-label': label, key: label })
  bar.setAttribute('value', Math.min(value ?? 0, most || 1))
  bar.own = true // its value is an attribute that has to change
  return bar
}

// table shows rows. Arrow keys (or j and k) go from row to row, Enter opens one, Space selects it.
// columns: [{name, cls, cell(row), head}]; options: key(row), open(row), select(row), selected(row), label.
export function table(columns, rows, options) {
  return h('div', { class: 'table', tabindex: 0, role: 'region', 'aria-label': options.label, onkeydown: walk },
    h('table', {},
      h('colgroup', {}, columns.map((c) => h('col', { class: c.cls }))),
      h('thead', {}, h('tr', {}, columns.map((c) => h('th', { scope: 'col', class: c.cls }, c.head ?? c.name)))),
      h('tbody', {}, rows.map((row) => tableRow(columns, row, options)))))
}

function tableRow(columns, row, o) {
  const onclick = o.open && ((e) => {
    if (!e.target.closest('button, a, input, label') && getSelection().isCollapsed) o.open(row)
  })
  const onkeydown = (o.open || o.select) && ((e) => {
    if (e.target !== e.currentTarget) return
    if (e.key === 'Enter' && o.open) o.open(row)
    else if (e.key === ' ' && o.select) o.select(row)
    else return
    e.preventDefault()
  })
  return h('tr', {
    key: o.key(row), tabindex: -1, class: o.open ? 'opens' : '', onclick, onkeydown,
    'aria-selected': o.selected ? String(o.selected(row)) : null,
  }, columns.map((c) => h('td', { class: c.cls }, c.cell(row))))
}

const steps = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }

function walk(e) {
  const step = steps[e.key]
  if (!step || e.ctrlKey || e.metaKey || e.altKey || e.target.matches('input, select, textarea')) return
  const rows = [...e.currentTarget.querySelectorAll('tbody > tr')]
  const now = rows.indexOf(document.activeElement.closest('tbody > tr'))
  const next = rows[now < 0 ? 0 : Math.min(rows.length - 1, Math.max(0, now + step))]
  next?.focus()
  e.preventDefault()
}

// field is an input with its label and advice.
export const field = (label, props, advice) =>
  h('label', { class: 'field' }, h('span', {}, label),
    h('input', { type: 'text', autocomplete: 'off', spellcheck: 'false', ...props }), advice && h('small', {}, advice))
