// Keeps the page fresh and sends people's wishes. The page is whole without it.
"use strict";

const main = document.getElementById("main");
const stale = document.getElementById("stale");
let seen = null; // what was shown last, to change nothing that has not changed
let stream = null; // the live view, while the page can be seen
let due = null; // a refresh that is about to happen

function busyReading() {
  const selected = document.getSelection();
  const editing = document.activeElement && document.activeElement.closest("form");
  return document.hidden || Boolean(editing) || (selected && !selected.isCollapsed);
}

function addressOfFocus() {
  const link = document.activeElement && document.activeElement.closest("main a[href]");
  return link ? link.getAttribute("href") : null;
}

async function refresh() {
  const answer = await fetch(location.href, { cache: "no-store" });
  if (!answer.ok) throw new Error(String(answer.status));
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const fresh = page.getElementById("main");
  const html = fresh ? fresh.innerHTML : null;
  if (html !== null && html !== seen) {
    const focused = addressOfFocus();
    const tokens = main.querySelector(".tokens");
    const scrolled = tokens ? tokens.scrollTop : null;
    const open = [...main.querySelectorAll("details")].map((each) => each.open);
    seen = html;
    main.replaceChildren(...fresh.childNodes);
    main.dataset.refreshS = fresh.dataset.refreshS || "";
    document.title = page.title;
    [...main.querySelectorAll("details")].forEach((each, index) => { each.open = Boolean(open[index]); });
    prepare(scrolled);
    if (focused) {
      const again = [...main.querySelectorAll("a[href]")].find((link) => link.getAttribute("href") === focused);
      if (again) again.focus({ preventScroll: true });
    }
  }
  stale.hidden = true;
}

// Something changed: look soon, but once for everything that happens together.
function soon() {
  if (due !== null) return;
  due = setTimeout(async () => {
    due = null;
    if (document.hidden) return;
    if (busyReading()) { soon(); return; }
    try { await refresh(); } catch { stale.hidden = false; }
  }, 400);
}

// A hidden tab holds no connection: browsers allow few of them to one host.
function listen() {
  if (stream) { stream.close(); stream = null; }
  if (document.hidden || !main.dataset.live || !window.EventSource) return;
  stream = new EventSource(main.dataset.live);
  for (const kind of ["incident", "step", "reset"]) stream.addEventListener(kind, soon);
}

async function loop() {
  const seconds = Number(main.dataset.refreshS);
  if (!seconds) return;
  await new Promise((done) => setTimeout(done, 1000 * seconds));
  const heard = stream && stream.readyState === EventSource.OPEN;
  if (!heard && !busyReading()) {
    try { await refresh(); } catch { stale.hidden = false; }
  }
  ages();
  loop();
}

function ages() {
  for (const each of main.querySelectorAll("time[datetime]")) {
    const seconds = (Date.now() - Date.parse(each.dateTime)) / 1000;
    if (!(seconds >= 5)) continue;
    const [size, name] = [[86400, "d"], [3600, "h"], [60, "min"]].find(([size]) => seconds >= size) || [1, "s"];
    each.textContent = `${Math.round(seconds / size)} ${name} ago`;
  }
}

function requested(wish, form) {
  const by = form.elements.by.value, text = form.elements.text.value;
  const incident = `/api/v1/incidents/${form.dataset.incident}/${wish === "unpin" ? "pin" : wish}`;
  switch (wish) {
    case "comments": return [incident, { by, text }];
    case "resolve": case "reopen": return [incident, { by, reason: text }];
    case "pin": case "unpin": return [incident, { by, pinned: wish === "pin" }];
    case "silence":
      return ["/api/v1/silences", { by, reason: text, hours: 8, matchers: [{ name: "run", value: form.dataset.run }] }];
    default: return [incident, { by }];
  }
}

async function send(event) {
  event.preventDefault();
  const form = event.target;
  const said = form.querySelector(".said-back");
  const wish = event.submitter ? event.submitter.value : "comments";
  localStorage.setItem("gradloc-by", form.elements.by.value);
  said.textContent = "Sending…";
  try {
    const [address, body] = requested(wish, form);
    const answer = await fetch(address, {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
    });
    const told = await answer.json();
    if (!answer.ok) throw new Error(`${told.detail}. ${told.what_to_do}`);
    document.activeElement.blur();
    await refresh();
    main.querySelector(".said-back").textContent = wish === "relocalize" ? "Asked for another localization." : "Done.";
  } catch (error) {
    said.textContent = error.message;
  }
}

async function copy(event) {
  const button = event.currentTarget;
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "Copied";
  } catch {
    button.textContent = button.dataset.copy; // not a secure page: there it is, to copy by hand
  }
}

function prepare(scrolled) {
  for (const card of main.querySelectorAll(".act")) card.hidden = false;
  for (const form of main.querySelectorAll("form[data-incident]")) {
    form.addEventListener("submit", send);
    form.elements.by.value = localStorage.getItem("gradloc-by") || "";
  }
  for (const button of main.querySelectorAll("button[data-copy]")) {
    button.hidden = false;
    button.addEventListener("click", copy);
  }
  const tokens = main.querySelector(".tokens");
  const culprit = tokens && tokens.querySelector(".culprit");
  if (scrolled !== null && tokens) tokens.scrollTop = scrolled;
  else if (culprit) centre(tokens, culprit, 8);
}

// Chunks out of view have a guessed height: what lies between is laid out on the way, so look again.
function centre(tokens, culprit, times) {
  const place = culprit.getBoundingClientRect(), box = tokens.getBoundingClientRect();
  const off = place.top - box.top - tokens.clientHeight / 2;
  if (Math.abs(off) > 20) tokens.scrollTop += off;
  if (times > 0) requestAnimationFrame(() => centre(tokens, culprit, times - 1));
}

prepare(null);
listen();
document.addEventListener("visibilitychange", () => { listen(); if (!document.hidden) soon(); });
loop();
