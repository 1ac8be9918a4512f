// With this, pages send the key in a header, need no reload, and change as something happens.
"use strict";
(() => {
  const KEY = "relay-key";
  const SILENT_MS = 40000; // the stream speaks every 15 s
  const LEAST_MS = 300; // between two looks
  const root = document.documentElement;
  const main = () => document.getElementById("main");

  // The key comes in the fragment, once, and stays in this tab.
  if (/^#[\w-]{20,}$/.test(location.hash)) {
    sessionStorage.setItem(KEY, location.hash.slice(1));
    history.replaceState(null, "", location.pathname + location.search);
  }

  function ask(address, options = {}) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
    return fetch(address, { ...options, headers, cache: "no-store" });
  }

  const element = (name, fields) => Object.assign(document.createElement(name), fields);

  function say(text, look) {
    const state = document.getElementById("state");
    if (state.textContent === text) return;
    state.replaceChildren(element("span", { className: look, textContent: text }));
  }

  const parsed = async (response) =>
    new DOMParser().parseFromString(await response.text(), "text/html");

  // Change what differs and keep the rest: focus, and what a person typed, unfolded or pressed.
  function morph(old, fresh) {
    if (old.nodeName !== fresh.nodeName) return old.replaceWith(fresh);
    if (old.nodeType !== Node.ELEMENT_NODE) {
      if (old.data !== fresh.data) old.data = fresh.data;
      return;
    }
    for (const { name } of [...old.attributes])
      if (!fresh.hasAttribute(name) && !/^(open|disabled)$/.test(name)) old.removeAttribute(name);
    for (const { name, value } of fresh.attributes)
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    if (old.nodeName === "TEXTAREA") return;
    const ids = new Set([...fresh.children].map((one) => one.id));
    for (const one of [...old.children]) if (one.id && !ids.has(one.id)) one.remove();
    const kept = Map.groupBy(old.children, (one) => one.id);
    let at = old.firstChild;
    for (const one of [...fresh.childNodes]) {
      const isLike = at && !at.id && !one.id && at.nodeName === one.nodeName;
      const twin = one.id ? kept.get(one.id)?.shift() : isLike ? at : null;
      if (!twin) {
        if (one.classList?.contains("row")) one.classList.add("new");
        old.insertBefore(one, at);
        continue;
      }
      for (; twin !== at && !at.id; at.previousSibling.remove()) at = at.nextSibling; // not moved
      if (twin === at) at = at.nextSibling;
      else old.insertBefore(twin, at);
      morph(twin, one);
    }
    for (let next; at; at = next) {
      next = at.nextSibling;
      if (at.getAttribute?.("role") !== "alert") at.remove(); // what was refused stays
    }
  }

  function head(page) {
    document.title = page.title;
    root.dataset.position = page.documentElement.dataset.position || "";
    morph(document.querySelector(".top nav"), page.querySelector(".top nav"));
    if (page.querySelector(".again")) setTimeout(lookSoon, 2000); // the index is behind
  }

  let turn = 0; // of pages: what was asked for in an earlier one is not shown any more
  async function show(asked, isPushed) {
    const mine = ++turn;
    const response = await asked;
    const page = await parsed(response);
    if (mine !== turn) return;
    turn += 1; // nor what was asked for meanwhile
    if (isPushed) history.pushState(null, "", response.url);
    head(page);
    main().replaceWith(page.getElementById("main"));
    const find = document.querySelector(".find input");
    if (document.activeElement !== find) find.value = page.querySelector(".find input").value;
    main().focus({ preventScroll: true });
    scrollTo(0, 0);
    follow();
  }

  const failed = () => say("relay web does not answer", "bad");
  const go = (address, isPushed) => show(ask(address), isPushed).catch(failed);

  let waiting = null;
  let isLooking = false;
  let next = 0; // look: a page that takes long is looked at less often
  async function look() {
    waiting = null;
    if (isLooking) return lookSoon();
    const [mine, began] = [turn, Date.now()];
    next = began + LEAST_MS;
    isLooking = true;
    try {
      const response = await ask(location.href);
      if (response.status === 401) return say("key needed", "bad");
      const page = await parsed(response);
      if (mine !== turn) return;
      const error = page.getElementById("error")?.textContent;
      if (error && !document.getElementById("error")) {
        setTimeout(lookSoon, 2000); // what is typed stays
        return say(error, "bad");
      }
      head(page);
      morph(main(), page.getElementById("main"));
      if (stream?.isLive) say("live", "live");
    } catch {
      failed();
    } finally {
      isLooking = false;
      next = Math.max(next, Date.now() + 5 * (Date.now() - began));
    }
  }
  const lookSoon = () => (waiting ??= setTimeout(look, Math.max(0, next - Date.now())));

  // A browser that follows a link itself does not send the key.
  async function save(link) {
    const response = await ask(link.href);
    if (!response.ok) return show(response, true);
    const href = URL.createObjectURL(await response.blob());
    element("a", { href, download: link.download }).click();
    setTimeout(() => URL.revokeObjectURL(href), SILENT_MS);
  }

  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[href]");
    const isOurs = link && link.origin === location.origin && !link.hash;
    const isPlain = event.button === 0 && !(event.ctrlKey || event.metaKey || event.shiftKey);
    if (!isOurs || !isPlain || link.target || link.pathname.endsWith(".json")) return;
    event.preventDefault();
    if (!link.download) return go(link.href, true);
    save(link).catch(failed);
  });
  addEventListener("popstate", () => go(location.href, false));

  document.addEventListener("submit", async (event) => {
    const form = event.target;
    event.preventDefault();
    if ("key" in form.dataset) {
      sessionStorage.setItem(KEY, form.querySelector("input").value.trim().replace(/^.*#/, ""));
      return go(location.href, false);
    }
    const fields = new URLSearchParams(new FormData(form, event.submitter));
    if (form.method !== "post") return go(`${form.action}?${fields}`, true);
    const buttons = form.querySelectorAll("button");
    for (const one of buttons) one.disabled = true; // twice is two messages
    let error = "relay web does not answer";
    try {
      const response = await ask(form.action, { method: "POST", body: fields });
      if (response.ok || response.redirected) return await show(response, true); // it is done
      error = (await parsed(response)).getElementById("error")?.textContent || response.statusText;
    } catch {}
    for (const one of buttons) one.disabled = false;
    const said = form.querySelector(".said") || form.appendChild(element("p"));
    Object.assign(said, { className: "said bad", role: "alert", textContent: error });
  });

  let stream = null; // of the tab that is seen; a browser has few connections
  // What happened since the page that is shown was made is told at once.
  async function follow() {
    stream?.attempt.abort();
    stream = null;
    if (document.hidden) return;
    const mine = (stream = {});
    for (let pause = 250; stream === mine; pause = Math.min(2 * pause, 4000)) {
      const attempt = (mine.attempt = new AbortController());
      let guard;
      const heard = () => {
        clearTimeout(guard);
        guard = setTimeout(() => attempt.abort(), SILENT_MS);
      };
      try {
        heard();
        const headers = { "Last-Event-ID": root.dataset.position };
        const response = await ask("/events", { headers, signal: attempt.signal });
        if (response.status === 401) return say("key needed", "bad");
        if (!response.ok) throw response; // of too many connections, say: asked for again
        mine.isLive = true;
        say("live", "live");
        const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
        for (let part = await reader.read(); !part.done; part = await reader.read()) {
          heard();
          pause = 250;
          if (part.value.includes("event:")) lookSoon();
        }
      } catch {}
      clearTimeout(guard);
      mine.isLive = false;
      if (stream === mine) say("reconnecting", "bad");
      await new Promise((done) => setTimeout(done, pause));
    }
  }
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) lookSoon();
    follow();
  });

  if (root.dataset.position) follow();
  else go(location.href, false);
})();
