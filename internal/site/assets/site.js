"use strict";
(() => {
  const root = document.documentElement;
  const query = document.querySelector(".query");
  const results = document.querySelector(".results");
  const button = document.querySelector(".theme");

  // Theme: the system's, until the button says otherwise. A browser may refuse storage to a file.
  const stored = () => { try { return localStorage.getItem("walpost-theme"); } catch { return null; } };
  const store = (theme) => { try { localStorage.setItem("walpost-theme", theme); } catch { /* this page only */ } };
  const isDark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const show = (theme) => {
    if (theme === "dark" || theme === "light") root.dataset.theme = theme;
    button.textContent = isDark() ? "Light" : "Dark";
  };
  button.addEventListener("click", () => { const theme = isDark() ? "light" : "dark"; store(theme); show(theme); });
  button.hidden = false;
  show(stored());

  // A link of the navigation into this page closes the menu of a narrow screen.
  document.querySelector("nav").addEventListener("click", (e) => {
    if (e.target.closest("a")) document.querySelector(".menu input").checked = false;
  });
  const current = document.querySelector("nav [aria-current]");
  if (current) {
    const nav = document.querySelector("nav");
    nav.scrollTop = Math.max(0, current.offsetTop - nav.offsetTop - 120);
  }

  // Search: all words have to be in a section or its headings. The index is a script, because a page that was
  // opened as a file cannot fetch.
  document.querySelector(".search").hidden = false;
  let loading = null;
  const load = () => loading ??= new Promise((done) => {
    const script = document.createElement("script");
    script.src = "search.js";
    script.onload = () => done(window.walpostSections.map(([link, page, heading, text]) =>
      ({ link, page, heading, text, low: text.toLowerCase(), title: heading.toLowerCase(), lowPage: page.toLowerCase() })));
    script.onerror = () => done([]);
    document.head.append(script);
  });
  const count = (text, word) => Math.min(text.split(word).length - 1, 5);
  const score = (s, words, phrase) => {
    let points = s.title === phrase ? 100 : s.title.includes(phrase) ? 30 : s.low.includes(phrase) ? 10 : 0;
    for (const w of words) {
      const found = count(s.low, w) + (s.title.includes(w) ? 12 : 0) + (s.lowPage.includes(w) ? 3 : 0);
      if (found === 0) return 0;
      points += found;
    }
    return points;
  };
  // marked appends text to the element, with each of the words in a mark.
  const marked = (element, text, words) => {
    const low = text.toLowerCase();
    let at = 0;
    while (at < text.length) {
      let next = -1, length = 0;
      for (const w of words) {
        const i = low.indexOf(w, at);
        if (i >= 0 && (next < 0 || i < next)) [next, length] = [i, w.length];
      }
      if (next < 0) break;
      element.append(text.slice(at, next));
      const mark = document.createElement("mark");
      mark.textContent = text.slice(next, next + length);
      element.append(mark);
      at = next + length;
    }
    element.append(text.slice(at));
  };
  const excerpt = (s, words) => {
    const first = Math.min(...words.map((w) => s.low.indexOf(w)).filter((i) => i >= 0));
    const from = Number.isFinite(first) ? Math.max(0, s.text.lastIndexOf(" ", Math.max(0, first - 50))) : 0;
    return (from > 0 ? "…" : "") + s.text.slice(from, from + 180) + (from + 180 < s.text.length ? "…" : "");
  };
  const item = (s, words) => {
    const link = document.createElement("a");
    link.href = s.link;
    const place = document.createElement("span");
    place.append(s.page === s.heading ? "" : s.page + " › ");
    const strong = document.createElement("strong");
    strong.textContent = s.heading;
    place.append(strong);
    const text = document.createElement("span");
    text.className = "text";
    marked(text, excerpt(s, words), words);
    link.append(place, text);
    return link;
  };
  const search = async () => {
    const phrase = query.value.trim().toLowerCase();
    const sections = await load();
    if (phrase !== query.value.trim().toLowerCase()) return; // typed on meanwhile
    results.hidden = phrase.length < 2;
    if (results.hidden) return;
    const words = phrase.split(/\s+/);
    const found = sections.map((s) => ({ s, points: score(s, words, phrase) })).filter((f) => f.points > 0)
      .sort((a, b) => b.points - a.points);
    const items = found.slice(0, 30).map((f) => item(f.s, words));
    if (items.length === 0) {
      const none = document.createElement("p");
      none.textContent = sections.length === 0 ? "search.js is missing beside this page." : `Nothing has "${query.value.trim()}".`;
      items.push(none);
    }
    results.replaceChildren(...items);
    results.scrollTop = 0;
  };
  const choose = (step) => {
    const items = [...results.querySelectorAll("a")];
    if (items.length === 0) return;
    const now = items.findIndex((a) => a.classList.contains("chosen"));
    items[now]?.classList.remove("chosen");
    const next = items[(now + step + items.length + (now < 0 && step < 0 ? 1 : 0)) % items.length];
    next.classList.add("chosen");
    next.scrollIntoView({ block: "nearest" });
  };
  query.addEventListener("focus", load);
  query.addEventListener("input", search);
  query.addEventListener("keydown", (e) => {
    if (e.key === "ArrowDown" || e.key === "ArrowUp") { e.preventDefault(); choose(e.key === "ArrowDown" ? 1 : -1); }
    if (e.key === "Enter") (results.querySelector("a.chosen") ?? results.querySelector("a"))?.click();
    if (e.key === "Escape") { results.hidden = true; query.blur(); }
  });
  results.addEventListener("click", (e) => { if (e.target.closest("a")) { results.hidden = true; query.blur(); } });
  document.addEventListener("click", (e) => { if (!e.target.closest(".search")) results.hidden = true; });
  document.addEventListener("keydown", (e) => {
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement.tagName) && document.activeElement.type !== "checkbox";
    if (e.key === "/" && !typing && !e.ctrlKey && !e.metaKey && !e.altKey) { e.preventDefault(); query.focus(); query.select(); }
  });
})();
