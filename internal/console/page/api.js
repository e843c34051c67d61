// Requests to the console's server. The token is in memory and in this tab's session only.

const base = new URL('api/', document.baseURI)
const place = 'walpost.token'
const patience = 15000 // ms

// ApiError has the server's error and hint. Its status is 0 where no answer came.
export class ApiError extends Error {
  constructor(status, message, hint) {
    super(message)
    this.status = status
    this.hint = hint
  }
}

// takeToken takes the token out of the address bar: it must not stay in the history.
export function takeToken() {
  const found = /^#token=(.+)$/.exec(location.hash)
  if (!found) return
  setToken(decodeURIComponent(found[1]))
  history.replaceState(null, '', location.pathname + '#/overview')
}

export const setToken = (token) => sessionStorage.setItem(place, token)

export const hasToken = () => sessionStorage.getItem(place) !== null

export const get = (path, options) => ask(path, options)

export const post = (path, body) =>
  ask(path, { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(body) })

async function ask(path, options = {}) {
  const limit = AbortSignal.timeout(patience)
  const signal = options.signal ? AbortSignal.any([options.signal, limit]) : limit
  const response = await send(path, { ...options, signal })
  try {
    return await response.json()
  } catch (err) {
    throw away(err)
  }
}

// open returns a response that goes on, such as the live tail.
export const open = (path, signal) => send(path, { signal })

async function send(path, options) {
  const token = sessionStorage.getItem(place)
  const headers = { ...options.headers, ...(token && { Authorization: 'Bearer ' + token }) }
  let response
  try {
    response = await fetch(new URL(path, base), { ...options, headers, cache: 'no-store', credentials: 'omit' })
  } catch (err) {
    throw away(err)
  }
  if (response.ok) return response
  const said = await response.json().catch(() => ({}))
  throw new ApiError(response.status, said.error ?? `the server answers ${response.status}`, said.hint ?? '')
}

function away(err) {
  if (err.name === 'AbortError') return err
  return new ApiError(0, err.name === 'TimeoutError' ? 'the console does not answer' : 'the console cannot be reached',
    'it is `walpost ui` or `walpost run`; this page goes on by itself when it is back')
}

// every asks now and then again, while the tab is visible. It asks one question at a time: now, while one is under
// way, asks again behind it.
export function every(ms, question) {
  let timer = 0, asking = false, again = false, stopped = false
  const run = async () => {
    clearTimeout(timer)
    again = asking
    if (asking || stopped || document.hidden) return
    asking = true
    try {
      await question()
    } finally {
      asking = false
      if (!stopped && (ms || again)) timer = setTimeout(run, again ? 0 : ms)
    }
  }
  document.addEventListener('visibilitychange', run)
  run()
  return {
    now: run,
    stop() {
      stopped = true
      clearTimeout(timer)
      document.removeEventListener('visibilitychange', run)
    },
  }
}
