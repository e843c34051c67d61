// Dead letters: rows that were given up. They are retried or discarded, one or many.
import { get, post } from '../api.js'
import { confirmed, details, toast } from '../dialog.js'
import { data, h } from '../dom.js'
import { bytes, count, number } from '../format.js'
import { payload } from '../payload.js'
import { action, button, empty, facts, moment, panel, problem, readOnly, table, time } from '../widgets.js'

const pageSize = 100

const query = (l, limit) => {
  const q = new URLSearchParams({ limit })
  if (l.before) q.set('before', l.before)
  if (l.eventType) q.set('event_type', l.eventType)
  if (l.aggregateID) q.set('aggregate_id', l.aggregateID)
  return 'deadletters?' + q
}

// byType is "3 of order.placed, 1 of order.paid".
function byType(letters) {
  const counts = new Map()
  for (const l of letters) counts.set(l.event_type, (counts.get(l.event_type) ?? 0) + 1)
  return [...counts].sort((a, b) => b[1] - a[1])
}

// cures is what helps where a retry alone does not, and how many it is about.
function cures(letters) {
  const counts = new Map()
  for (const l of letters) if (l.what_helps) counts.set(l.what_helps, (counts.get(l.what_helps) ?? 0) + 1)
  return [...counts]
}

async function change(ctx, what, letters) {
  const types = byType(letters), n = count(letters.length, 'dead letter')
  const retry = what === 'retry'
  const yes = await confirmed(`${retry ? 'Retry' : 'Discard'} ${n}?`, [
    h('ul', {}, types.slice(0, 8).map(([type, k]) => h('li', {}, h('b', {}, number(k)), ' ', data(type ?? 'no event type'))),
      types.length > 8 && h('li', {}, `and ${count(types.length - 8, 'more type')}`)),
    retry && cures(letters).map(([what, k]) => h('p', { class: 'notice warn' }, `${number(k)} of ${number(letters.length)}: ${what}.`)),
    h('p', {}, retry ? 'The rows go back into their outbox, and the relay tries them again.'
      : 'The rows are deleted, and their events are never published. This cannot be undone.'),
  ], `${retry ? 'Retry' : 'Discard'} ${n}`, !retry)
  if (!yes) return
  try {
    const { done, failed } = await post('deadletters/' + what, { ids: letters.map((l) => l.id) })
    ctx.local.failed = failed
    for (const id of done) ctx.local.selected.delete(id)
    toast(`${retry ? 'Put back' : 'Discarded'}: ${count(done.length, 'dead letter')}` + (failed.length ? `; ${number(failed.length)} failed` : ''), failed.length > 0)
  } catch (err) {
    toast(`${err.message}${err.hint ? ': ' + err.hint : ''}`, true)
  }
  ctx.local.drawer?.close()
  await reload(ctx)
  if (document.activeElement === document.body) document.querySelector('main .table')?.focus()
}

async function reload(ctx) {
  ctx.local.wanted = true
  await ctx.reload()
}

async function open(ctx, letter) {
  const state = {}
  let whole = null, err = null
  const drawer = details(`Dead letter ${letter.id}`, () => [
    h('div', { class: 'bar' }, action(ctx, 'Retry', () => change(ctx, 'retry', [letter]), { class: 'primary' }),
      action(ctx, 'Discard', () => change(ctx, 'discard', [letter]), { class: 'danger' }), readOnly(ctx)),
    facts([
      ['Error', letter.error], letter.what_helps && ['What helps', letter.what_helps], ['Event type', letter.event_type], ['Aggregate', [data(letter.aggregate_type), '/', data(letter.aggregate_id)]],
      ['Tenant', letter.tenant_id], ['Row', [data(letter.row_id), ' of ', data(letter.outbox)]],
      ['Attempts', number(letter.attempts)], ['Given up', moment(letter.failed_at)],
    ]),
    err ? problem(err) : whole ? payload(whole, ctx.overview, state, () => drawer.update()) : h('p', { class: 'loading' }, 'Loading …'),
  ])
  ctx.local.drawer = drawer
  try {
    whole = await get('deadletters/' + letter.id)
  } catch (e) {
    err = e
  }
  if (drawer.open) drawer.update()
}

function columns(ctx, letters) {
  const { selected } = ctx.local
  const all = letters.length > 0 && letters.every((l) => selected.has(l.id))
  const setAll = () => {
    for (const l of letters) all ? selected.delete(l.id) : selected.set(l.id, l)
    ctx.redraw()
  }
  const box = (on, label, onchange, tabindex) => h('input', { type: 'checkbox', checked: on, 'aria-label': label, onchange, tabindex })
  return [
    { head: box(all, 'Select all on this page', setAll), cls: 'c-check', cell: (l) => box(selected.has(l.id), `Select ${l.id}`, () => toggle(ctx, l), -1) },
    { name: 'Id', cls: 'c-id p2', cell: (l) => l.id },
    { name: 'Event type', cls: 'c-name', cell: (l) => data(l.event_type) },
    { name: 'Aggregate', cls: 'c-name p2', cell: (l) => [data(l.aggregate_type), '/', data(l.aggregate_id)] },
    { name: 'Error', cls: 'c-long', cell: (l) => data(l.error) },
    { name: 'Tries', cls: 'c-num p2', cell: (l) => number(l.attempts) },
    { name: 'Payload', cls: 'c-num p3', cell: (l) => bytes(l.payload_bytes) },
    { name: 'Given up', cls: 'c-time', cell: (l) => time(l.failed_at) },
  ]
}

function toggle(ctx, letter) {
  const { selected } = ctx.local
  selected.has(letter.id) ? selected.delete(letter.id) : selected.set(letter.id, letter)
  ctx.redraw()
}

function filters(ctx) {
  const l = ctx.local
  const submit = (e) => {
    e.preventDefault()
    const typed = new FormData(e.currentTarget)
    Object.assign(l, { eventType: typed.get('type').trim(), aggregateID: typed.get('aggregate').trim(), before: null, earlier: [] })
    reload(ctx)
  }
  const input = (name, label) => h('input', { type: 'search', name, placeholder: label, 'aria-label': label, autocomplete: 'off', spellcheck: 'false' })
  return h('form', { class: 'bar filters', onsubmit: submit }, input('type', 'Event type'), input('aggregate', 'Aggregate id'), h('button', { type: 'submit' }, 'Filter'))
}

function turn(ctx, before, earlier) {
  Object.assign(ctx.local, { before, earlier })
  reload(ctx)
}

function pages(ctx, d) {
  const { before, earlier } = ctx.local
  if (!earlier.length && !d.next) return null
  return h('div', { class: 'bar pages' },
    button('← Newer', () => turn(ctx, earlier.at(-1), earlier.slice(0, -1)), { disabled: !earlier.length }),
    h('span', { class: 'hint' }, `Page ${earlier.length + 1}`),
    button('Older →', () => turn(ctx, d.next, [...earlier, before]), { disabled: !d.next }))
}

function chosen(ctx) {
  const all = [...ctx.local.selected.values()], n = number(all.length)
  return h('div', { class: 'bar' },
    action(ctx, `Retry ${all.length ? n : ''}`, () => change(ctx, 'retry', all), { disabled: !all.length, class: 'primary' }),
    action(ctx, `Discard ${all.length ? n : ''}`, () => change(ctx, 'discard', all), { disabled: !all.length, class: 'danger' }),
    all.length > 0 && button('Select none', () => (ctx.local.selected.clear(), ctx.redraw()), { class: 'plain' }), readOnly(ctx))
}

export default {
  id: 'dead-letters', title: 'Dead letters', letter: 'd', every: 5000,
  enter: (ctx) => Object.assign(ctx.local, { selected: new Map(), earlier: [], before: null, wanted: true, failed: [] }),
  leave: (ctx) => ctx.local.drawer?.close(),
  // What is shown does not move under the reader: new dead letters are announced.
  async load(ctx) {
    const l = ctx.local
    if (l.wanted || !ctx.data) {
      const page = await get(query(l, pageSize))
      Object.assign(l, { wanted: false, fresh: false })
      return page
    }
    const newest = (await get(query({ ...l, before: null }, 1))).letters[0]
    l.fresh = !l.earlier.length && newest !== undefined && newest.id > (ctx.data.letters[0]?.id ?? 0)
    return ctx.data
  },
  draw(ctx) {
    const d = ctx.data, l = ctx.local, filtered = l.eventType || l.aggregateID
    return [
      filters(ctx),
      l.failed.map((f) => problem({ message: `${f.id}: ${f.error}`, hint: f.hint })),
      l.fresh && button('There are new dead letters. Show them', () => turn(ctx, null, []), { class: 'news' }),
      !d.letters.length ? empty(filtered ? 'No dead letter fits the filter.' : 'No dead letters.', 'Rows that fail 10 times (fallback.max_attempts) would be here.')
        : panel(count(d.total, 'dead letter', 'dead letters', d.total_limit && d.total), chosen(ctx),
          table(columns(ctx, d.letters), d.letters, {
            label: 'Dead letters', key: (x) => x.id, open: (x) => open(ctx, x),
            select: (x) => toggle(ctx, x), selected: (x) => l.selected.has(x.id),
          }), pages(ctx, d)),
    ]
  },
}
