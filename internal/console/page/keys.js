// Keys. A single letter is a key only outside of inputs and dialogs, and can be switched off.
import { h } from './dom.js'
import { dialog } from './dialog.js'
import { toggleTheme } from './frame.js'

const place = 'walpost.keys'
const enabled = () => localStorage.getItem(place) !== 'off'

// listen takes the keys. A view may have more: keys: {p: {does, run(ctx)}}.
export function listen({ views, reload, current }) {
  let going = 0 // until when a letter after g counts
  const go = (view) => (location.hash = '#/' + view.id)
  const help = () => showHelp(views, current().view)
  document.getElementById('help').onclick = help
  document.getElementById('theme').onclick = toggleTheme
  document.addEventListener('keydown', (e) => {
    if (e.defaultPrevented || e.ctrlKey || e.metaKey || e.altKey || e.target.closest('input, textarea, select, dialog') || !enabled()) return
    const then = going > Date.now()
    going = 0
    const view = then ? views.find((v) => v.letter === e.key) : views[Number(e.key) - 1]
    const { view: now, ctx } = current()
    if (view) go(view)
    else if (then) return
    else if (e.key === 'g') going = Date.now() + 1500
    else if (e.key === '?') help()
    else if (e.key === 't') toggleTheme()
    else if (e.key === 'r') reload()
    else if (e.key === 'j') document.querySelector('main tbody tr')?.focus()
    else if (e.key === '/') {
      const filter = document.querySelector('main input')
      if (!filter) return
      filter.focus()
    } else if (now.keys?.[e.key]) now.keys[e.key].run(ctx)
    else return
    e.preventDefault()
  })
}

function showHelp(views, view) {
  const row = (keys, does) => h('div', {}, h('dt', {}, keys.map((k) => h('kbd', {}, k))), h('dd', {}, does))
  const d = dialog('help ask', 'Keys', () => [
    h('dl', { class: 'keys' },
      views.map((v, i) => row([String(i + 1), 'g ' + v.letter], v.title)),
      Object.entries(view.keys ?? {}).map(([k, { does }]) => row([k], does)),
      row(['↑', '↓', 'j', 'k'], 'from row to row'),
      row(['Enter'], 'open a row'),
      row(['Space'], 'select a row'),
      row(['/'], 'to the filter'),
      row(['r'], 'ask again now'),
      row(['t'], 'colours: system, light, dark'),
      row(['Esc'], 'close'),
      row(['?'], 'these keys')),
    h('label', { class: 'check' },
      h('input', {
        type: 'checkbox', checked: enabled(),
        onchange: (e) => {
          localStorage.setItem(place, e.target.checked ? 'on' : 'off')
          d.update()
        },
      }), 'Single keys are on'),
  ])
}
