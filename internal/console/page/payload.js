// A payload, indented where it is JSON, or as it is.
import { h, visible } from './dom.js'
import { bytes } from './format.js'
import { button, copy } from './widgets.js'

const deepest = 24 // levels that are indented
const longest = 1 << 20 // characters

// indented breaks JSON into lines. It changes no token: numbers keep every digit, and keys their order.
export function indented(text) {
  JSON.parse(text)
  let out = '', depth = 0, last = ''
  for (const [token] of text.matchAll(/"(?:[^"\\]+|\\.)*"|[[\]{},:]|[^\s[\]{},:"]+/g)) {
    const closes = token === ']' || token === '}', opened = last === '[' || last === '{'
    if (closes) depth--
    if (closes ? !opened : opened || last === ',') out += '\n' + '  '.repeat(Math.min(depth, deepest))
    out += token === ':' ? ': ' : token
    if (token === '[' || token === '{') depth++
    if (out.length > longest) throw new Error('too long')
    last = token
  }
  return out
}

// payload shows it; state keeps what the reader has chosen. o is the overview, which says whether payloads are shown.
export function payload(letter, o, state, redraw) {
  const text = letter.payload ?? letter.payload_base64
  if (text === null || text === undefined) {
    return h('p', { class: 'hint' }, o && !o.shows_payloads ? visible(o.payload_hint) : 'There is no payload, or it is too long to be shown.')
  }
  let pretty = null
  try {
    pretty = letter.payload_cut || letter.payload_base64 ? null : indented(text)
  } catch {} // it is not JSON
  const raw = state.raw || pretty === null
  const choose = (to) => () => {
    state.raw = to
    redraw()
  }
  return h('div', { class: 'payload' },
    h('div', { class: 'bar' },
      h('span', { class: 'hint' }, bytes(letter.payload_bytes ?? letter.bytes ?? text.length),
        letter.payload_base64 && ', not UTF-8, as base64', letter.payload_cut && `, the first ${bytes(text.length)} are shown`),
      h('span', { class: 'choice', role: 'group', 'aria-label': 'Payload' },
        button('Indented', choose(false), { 'aria-pressed': String(!raw), disabled: pretty === null }),
        button('Raw', choose(true), { 'aria-pressed': String(raw) })),
      copy(text)),
    h('pre', { tabindex: 0, dir: 'ltr' }, visible(raw ? text : pretty, true)))
}
