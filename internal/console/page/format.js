// Numbers, sizes and times as people read them. null is not known: "–".

const whole = new Intl.NumberFormat('en-US', { maximumFractionDigits: 0 })
const fine = new Intl.NumberFormat('en-US', { maximumSignificantDigits: 3 })
const unknown = (n) => n === null || n === undefined || Number.isNaN(n)

export const number = (n) => (unknown(n) ? '–' : whole.format(n))

// atLeast is a number that was counted up to a limit: 100,000+.
export const atLeast = (n, limit) => (unknown(n) ? '–' : number(n) + (limit && n >= limit ? '+' : ''))

// short is a number in little room: 1,240 or 12.4k.
export function short(n) {
  if (unknown(n)) return '–'
  if (Math.abs(n) < 10 && n % 1) return fine.format(n)
  if (Math.abs(n) < 10000) return whole.format(n)
  return n < 1e6 ? fine.format(n / 1e3) + 'k' : n < 1e9 ? fine.format(n / 1e6) + 'M' : fine.format(n / 1e9) + 'G'
}

export const rate = (n) => (unknown(n) ? '–' : short(n) + '/s')

// plural is what stands behind a number: row, or rows.
export const plural = (n, one, many = one + 's') => (n === 1 ? one : many)

// count is a number and its noun: 1 row, 12 rows, 100,000+ rows.
export const count = (n, one, many, limit) => `${atLeast(n, limit)} ${plural(n, one, many)}`

const units = { 1000: ['B', 'KB', 'MB', 'GB', 'TB', 'PB'], 1024: ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'] }

function size(n, base) {
  if (unknown(n)) return '–'
  let i = 0
  for (; Math.abs(n) >= 1000 && i < 5; i++) n /= base
  return (i === 0 ? whole : fine).format(n) + ' ' + units[base][i]
}

export const bytes = (n) => size(n, 1024)

let walBase = 1024

function shortest(n, base) {
  while (n > 0 && n % base === 0) n /= base
  return n
}

// walBudget notes postgres.max_retained_wal. Sizes of WAL have the unit of this key, as in `walpost status`.
export function walBudget(limit) {
  walBase = limit > 0 && shortest(limit, 1000) <= shortest(limit, 1024) ? 1000 : 1024
}

export const walBytes = (n) => size(n, walBase)

// steps are those of an axis: round numbers, and whole ones.
const steps = (base) => units[base].flatMap((_, i) => [1, 2, 5, 10, 20, 50, 100, 200, 500].map((n) => n * base ** i))

export const countSteps = steps(1000)

export const walSteps = () => steps(walBase)

// secondSteps are those of an axis of durations: whole units, so that each label is exact.
export const secondSteps = [
  ...[1, 2, 5, 10, 20, 50, 100, 200, 500].map((n) => n / 1000), ...[1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800],
  ...[1, 2, 5].map((n) => n * 3600), ...[1, 2, 5, 10, 20, 50, 100].map((n) => n * 86400),
]

export const millisecondSteps = [0.1, 0.2, 0.5, ...secondSteps.map((s) => s * 1000)]

export function milliseconds(ms) {
  if (unknown(ms)) return '–'
  return ms < 1000 ? fine.format(ms) + ' ms' : seconds(ms / 1000)
}

// seconds is a duration: 420 ms, 12 s, 1 min 20 s, 34 min, 5 h 12 min, 9 d.
export function seconds(s) {
  if (unknown(s)) return '–'
  if (s < 0.0005) return '0 s'
  if (s < 1) return Math.round(s * 1000) + ' ms'
  if (s < 10) return (Math.floor(s * 10) / 10) + ' s'
  if (s < 60) return Math.floor(s) + ' s'
  const hours = Math.floor(s / 3600), minutes = Math.floor((s % 3600) / 60), rest = Math.floor(s % 60)
  if (!hours) return `${minutes} min` + (minutes < 10 && rest ? ` ${rest} s` : '')
  if (hours < 10 && minutes) return `${hours} h ${minutes} min`
  if (hours < 48) return hours + ' h'
  return Math.floor(hours / 24) + ' d'
}

const months = 'Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec'.split(' ')
let skew = 0 // how far this machine's clock is ahead of the server's

// serverTime notes the server's clock, by which ages are shown.
export function serverTime(at) {
  const ms = Date.parse(at)
  if (ms) skew = Date.now() - ms
}

export const serverNow = () => new Date(Date.now() - skew).toISOString()

export const secondsSince = (at) => (at ? Math.max(0, (Date.now() - skew - Date.parse(at)) / 1000) : null)

export const secondsUntil = (at) => (Date.parse(at) - Date.now() + skew) / 1000

// ago is rough: its element's title has the time.
export const ago = (at) => (at ? seconds(secondsSince(at)).replace(/ (h|min) .*/, ' $1') + ' ago' : '–')

// clock is a time of day, with the date unless it is today's. All times are UTC.
export function clock(at) {
  const d = new Date(at)
  if (!at || Number.isNaN(d.getTime())) return '–'
  const text = d.toISOString(), today = new Date(Date.now() - skew).toISOString().slice(0, 10)
  return text.startsWith(today) ? text.slice(11, 19) : `${months[d.getUTCMonth()]} ${d.getUTCDate()}, ${text.slice(11, 16)}`
}
