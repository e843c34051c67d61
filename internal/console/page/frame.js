// The frame around the views: the relay's state, the sentence about what is wrong, and the way to the views.
import { data, h, render } from './dom.js'
import { clock, seconds, secondsSince, short } from './format.js'
import { relayState, totals, verdict } from './verdict.js'
import { badge, icon } from './widgets.js'

const at = (id) => document.getElementById(id)
const themes = ['', 'light', 'dark']
const themeNames = { '': 'Auto', light: 'Light', dark: 'Dark' }
const theme = () => document.documentElement.dataset.theme ?? ''

export function toggleTheme() {
  const next = themes[(themes.indexOf(theme()) + 1) % themes.length]
  if (next) document.documentElement.dataset.theme = next
  else delete document.documentElement.dataset.theme
  localStorage.setItem('walpost.theme', next)
  showTheme()
  document.dispatchEvent(new Event('themechange'))
}

function showTheme() {
  at('theme').textContent = themeNames[theme()]
  at('theme').setAttribute('aria-label', `Colours: ${themeNames[theme()]}`)
}
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => document.dispatchEvent(new Event('themechange')))
showTheme()

let marked = null // the view whose link has been scrolled to

export function drawFrame(state, views, current) {
  document.body.classList.toggle('away', state.away !== null)
  render(at('state'), state.overview && !state.locked && stateBadge(state))
  render(at('path'), state.overview && !state.locked && way(state.overview))
  render(at('version'), state.overview && data(state.overview.version))
  render(at('verdict'), sentence(state))
  render(at('nav'), views.map((v, i) => link(v, i, v === current, state)))
  if (current !== marked) at('nav').querySelector('[aria-current]')?.scrollIntoView({ block: 'nearest', inline: 'center' })
  marked = current
}

function stateBadge(state) {
  if (state.away) return badge('idle', 'Console away')
  const s = relayState(state.overview)
  return [badge(s.level, s.name), s.since && h('span', { class: 'for' }, 'for ' + seconds(secondsSince(s.since)))]
}

// way is where rows come from and go to.
function way({ status, relay }) {
  const steps = [
    ['Source', status?.server && `${status.server.database} · PostgreSQL ${status.server.version.split(' ')[0]}`],
    ['Slot', status?.slot?.name ?? relay?.slot],
    ['Stream', status?.stream?.name ?? relay?.stream],
  ]
  return h('ol', {}, steps.filter(([, v]) => v).map(([name, v]) => h('li', {}, h('span', {}, name), data(v))))
}

function sentence(state) {
  if (state.locked) return null
  if (state.away) {
    const { since, error } = state.away
    const text = error.status ? 'The console answers with an error.' : `The console has been away for ${seconds((Date.now() - since) / 1000)}.`
    const seen = state.overview ? ` What you see is from ${clock(state.overview.at)} UTC.` : ''
    return box({ level: 'bad', text: text + seen, more: `${error.message}; ${error.hint}` })
  }
  return box(verdict(state.overview, state.series, state.alarms))
}

function box(v) {
  if (!v) return null
  return h('div', { class: `verdict ${v.level}` }, icon(v.level),
    h('div', {}, h('strong', {}, v.text, v.see && [' ', h('a', { href: '#/' + v.see.id }, v.see.title)]), v.more && h('p', {}, data(v.more))))
}

function link(view, i, current, state) {
  const note = state.overview && !state.locked && notes[view.id]?.(state)
  return h('a', { href: '#/' + view.id, 'aria-current': current ? 'page' : null, 'aria-keyshortcuts': i + 1 },
    h('span', {}, view.title), note ? h('span', { class: `count ${note[0]}` }, note[1]) : h('kbd', {}, i + 1))
}

// notes are the figures beside the views' names, where they are not 0.
const notes = {
  held: ({ overview }) => {
    const { parked, limit } = totals(overview)
    return parked > 0 && ['warn', short(parked) + (parked >= limit ? '+' : '')]
  },
  'dead-letters': ({ overview: { status } }) =>
    status?.dead_letters > 0 && ['warn', short(status.dead_letters) + (status.dead_letters >= status.count_limit ? '+' : '')],
  alarms: ({ alarms }) => {
    const now = (alarms ?? []).filter((a) => a.active)
    return now.length > 0 && [now.some((a) => a.severity === 'critical') ? 'bad' : 'warn', now.length]
  },
}
