// The page: which view is shown, what is asked when, and the frame around the views.
import { ApiError, every, get, hasToken, setToken, takeToken } from './api.js'
import { extend, lastOf } from './charts.js'
import { h, render } from './dom.js'
import { serverTime, walBudget } from './format.js'
import { drawFrame } from './frame.js'
import { listen } from './keys.js'
import { field, problem } from './widgets.js'
import alarms from './views/alarms.js'
import consumers from './views/consumers.js'
import deadletters from './views/deadletters.js'
import doctor from './views/doctor.js'
import held from './views/held.js'
import overview from './views/overview.js'
import replay from './views/replay.js'
import slot from './views/slot.js'
import tail from './views/tail.js'

export const views = [overview, slot, held, deadletters, tail, consumers, replay, alarms, doctor]

const main = document.getElementById('main')

// What every view may read. overview and alarms are the newest answers; away is since when no answer came.
const state = { overview: null, series: null, alarms: null, away: null, locked: null }
let shown = null // {view, ctx, loop}

takeToken()

const watch = every(2000, async () => {
  await heard(async () => {
    state.overview = await get('overview')
    serverTime(state.overview.at)
    state.alarms = (await get('alarms').catch(() => null))?.alarms ?? state.alarms
  })
  draw()
})

// The series are kept in every view: the frame says when the WAL's budget is used up.
const sample = every(4000, async () => {
  if (state.away || state.locked) return
  try {
    const last = state.series?.t.at(-1)
    state.series = extend(state.series, await get(`series?since=${last ? last * 1000 : 0}`))
    walBudget(lastOf(state.series.budget_bytes))
  } catch {} // the other question says what is wrong
})

// heard notes whether the server answers, and whether it wants a token.
async function heard(ask) {
  try {
    await ask()
    if (state.locked || state.away) setTimeout(() => (shown?.loop.now(), sample.now()))
    state.away = state.locked = null
  } catch (err) {
    if (!(err instanceof ApiError)) throw err
    state.locked = err.status === 401 ? err : null
    if (err.status === 401) return
    state.away = { since: state.away?.since ?? Date.now(), error: err }
  }
}

function open(view) {
  shown?.loop.stop()
  shown?.view.leave?.(shown.ctx)
  main.replaceChildren()
  main.scrollTop = 0
  const ctx = {
    get overview() { return state.overview },
    get series() { return state.series },
    get alarms() { return state.alarms },
    data: null, error: null, local: {}, redraw: draw,
    reload: () => shown?.ctx === ctx && shown.loop.now(),
  }
  shown = { view, ctx, loop: { stop() {}, now() {} } }
  view.enter?.(ctx)
  draw()
  shown.loop = every(view.every ?? 0, () => load(view, ctx))
}

async function load(view, ctx) {
  if (!view.load || state.locked) return
  try {
    ctx.data = await view.load(ctx)
    ctx.error = null
  } catch (err) {
    if (!(err instanceof ApiError)) throw err
    if (err.status !== 0 && err.status !== 401) ctx.error = err // the frame says the others
  }
  if (shown?.ctx === ctx) draw()
}

function draw() {
  drawFrame(state, views, shown?.view)
  if (!shown) return
  document.title = `${shown.view.title} · walpost`
  if (state.locked) return render(main, tokenForm(state.locked))
  const { view, ctx } = shown
  if (ctx.error && !ctx.data) return render(main, title(view, ctx), problem(ctx.error))
  if (view.load && !ctx.data && !view.early) return render(main, title(view, ctx), h('p', { class: 'loading' }, 'Loading …'))
  render(main, title(view, ctx), ctx.error && problem(ctx.error), view.draw(ctx))
}

const title = (view, ctx) =>
  h('div', { class: 'title' }, h('h1', {}, view.title), h('div', { class: 'tools' }, view.tools?.(ctx)))

function tokenForm(err) {
  const submit = (e) => {
    e.preventDefault()
    const typed = new FormData(e.target).get('token').trim()
    setToken(typed.replace(/^.*#token=/, ''))
    watch.now()
  }
  return h('form', { class: 'token panel', onsubmit: submit },
    h('h1', {}, 'This console needs its token'),
    hasToken() ? problem(err) : h('p', { class: 'hint' }, 'It is printed by walpost ui. For the console of a relay it is in the file of http.token_file.'),
    field('Token, or the address that walpost has printed', { name: 'token', type: 'password', required: true, autofocus: true }),
    h('footer', {}, h('button', { type: 'submit', class: 'primary' }, 'Open')))
}

function route() {
  const id = location.hash.replace(/^#\/?/, '').split('?')[0]
  const view = views.find((v) => v.id === id)
  if (!view) return location.replace('#/overview')
  if (shown?.view !== view) open(view)
}

addEventListener('hashchange', () => {
  if (location.hash.startsWith('#token=')) {
    takeToken()
    watch.now()
  }
  if (location.hash !== '#main') route()
})
document.querySelector('.skip').onclick = (e) => {
  e.preventDefault()
  main.focus()
}
document.addEventListener('themechange', () => shown?.view.theme?.(shown.ctx))
setInterval(() => !document.hidden && state.away && draw(), 1000) // it counts the seconds
listen({ views, reload: () => (watch.now(), shown?.loop.now()), current: () => shown })
route()
