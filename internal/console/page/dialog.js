// Dialogs: details of a row, confirmations, help. The browser keeps the focus inside and gives it back.
import { h, render } from './dom.js'
import { button } from './widgets.js'

const host = document.getElementById('dialogs')
let number = 0

// dialog opens one, and returns what updates and closes it.
export function dialog(cls, title, draw, closed) {
  const body = h('div', { class: 'body' })
  const id = 'dialog' + ++number
  const box = h('dialog', { class: cls, 'aria-labelledby': id },
    h('header', {}, h('h2', { id, tabindex: -1, autofocus: cls !== 'ask' }, title), button('✕', () => box.close(), { class: 'plain', 'aria-label': 'Close' })), body)
  box.onclose = () => {
    box.remove()
    closed?.()
  }
  box.onclick = (e) => e.target === box && box.close() // beside it
  host.append(box)
  const update = () => render(body, draw())
  update()
  box.showModal()
  return { update, close: () => box.close(), get open() { return box.open } }
}

export const details = (title, draw) => dialog('drawer', title, draw)

// confirmed asks, and resolves with true where the answer is yes. text may be nodes.
export function confirmed(title, text, yes, danger) {
  return new Promise((resolve) => {
    let answer = false
    const d = dialog('ask', title, () => [
      h('div', { class: 'text' }, text),
      h('footer', {},
        button('Cancel', () => d.close(), { autofocus: danger }),
        button(yes, () => {
          answer = true
          d.close()
        }, { class: danger ? 'danger' : 'primary', autofocus: !danger })),
    ], () => resolve(answer))
  })
}

let fade = 0

// toast says what was done. It is read out, and goes away.
export function toast(text, bad) {
  const place = document.getElementById('toast')
  place.className = bad ? 'bad' : 'good'
  place.textContent = text
  clearTimeout(fade)
  fade = setTimeout(() => (place.textContent = ''), 8000)
}
