// Elements, and an update in place that keeps focus, selection and scroll position.
// Row data is hostile. It becomes text nodes only: nothing in this page parses a string as HTML.

// Control characters, bidi controls, invisible characters and lone surrogates.
const hidden =
  /[\p{Cc}\p{Cs}\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]/gu

// visible shows ESC as ␛, and a right-to-left override as \u202e. Line breaks stay where keepLines says so.
export function visible(text, keepLines = false) {
  return String(text).replace(hidden, (c) => {
    const code = c.codePointAt(0)
    if (keepLines && (c === '\n' || c === '\t')) return c
    if (code < 0x20) return String.fromCharCode(0x2400 + code)
    if (code === 0x7f) return '␡'
    return '\\u' + (code > 0xffff ? `{${code.toString(16)}}` : code.toString(16).padStart(4, '0'))
  })
}

const shown = 5000 // characters; the server cuts most values before

// data is a value of a row, message or error: apart from the text around it in its direction, and clipped by CSS.
export function data(value, cls = '') {
  if (value === null || value === undefined || value === '') return h('span', { class: 'none' }, '–')
  const text = String(value)
  const cut = text.length > shown ? text.slice(0, shown) + '…' : text
  return h('bdi', { class: 'data ' + cls }, visible(cut))
}

// h makes an element. Properties that begin with "on" are handlers; key names a node among its siblings.
export function h(tag, props, ...children) {
  const el = document.createElement(tag)
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue
    if (name === 'key') el.key = String(value)
    else if (name === 'checked') el.checked = value
    else if (name.startsWith('on')) {
      el[name] = value
      ;(el.handlers ??= []).push(name)
    } else el.setAttribute(name, value === true ? '' : value)
  }
  el.append(...nodes(children))
  return el
}

function nodes(children) {
  return children.flat(Infinity)
    .filter((c) => c !== null && c !== undefined && c !== false && c !== '')
    .map((c) => (c instanceof Node ? c : document.createTextNode(c)))
}

// render makes the children of an element what they should be, and touches only what differs. A node whose
// "own" is set looks after itself: it stays where it is, or is replaced as a whole.
export function render(parent, ...children) {
  reconcile(parent, nodes(children))
}

function reconcile(parent, next) {
  const keyed = new Map()
  for (const c of parent.childNodes) if (c.key !== undefined) keyed.set(c.key, c)
  let at = parent.firstChild
  for (const n of next) {
    const old = n.parentNode === parent ? n : n.key !== undefined ? keyed.get(n.key) : at
    if (!old || (old !== n && !alike(old, n))) {
      if (at && at.key === undefined && !next.includes(at)) {
        parent.replaceChild(n, at)
        at = n.nextSibling
      } else parent.insertBefore(n, at)
      continue
    }
    if (old === at) at = at.nextSibling
    else parent.insertBefore(old, at)
    if (old !== n) morph(old, n)
  }
  while (at) {
    const gone = at
    at = at.nextSibling
    gone.remove()
  }
}

const alike = (a, b) => a.nodeName === b.nodeName && a.key === b.key && !a.own && !b.own

// What the reader has opened, and what is being typed, stays.
const kept = new Set(['open', 'value'])

function morph(old, n) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== n.data) old.data = n.data
    return
  }
  for (const { name, value } of n.attributes) {
    if (!kept.has(name) && old.getAttribute(name) !== value) old.setAttribute(name, value)
  }
  for (const { name } of [...old.attributes]) if (!kept.has(name) && !n.hasAttribute(name)) old.removeAttribute(name)
  for (const name of old.handlers ?? []) old[name] = null
  for (const name of n.handlers ?? []) old[name] = n[name]
  old.handlers = n.handlers
  if (old.type === 'checkbox') old.checked = n.checked
  reconcile(old, [...n.childNodes])
}
