// The chosen colours, before the first paint. A classic script, because a module runs after it.
try {
  const chosen = localStorage.getItem('walpost.theme')
  if (chosen) document.documentElement.dataset.theme = chosen
} catch {} // a browser that keeps nothing follows the system
