// Keeps the page fresh and sends people's wishes. The page is whole without it.
"use strict";

const main = document.getElementById("main");
const stale = document.getElementById("stale");

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
  if (fresh && fresh.innerHTML !== main.dataset.seen) {
    const focused = addressOfFocus();
    const tokens = main.querySelector(".tokens");
    const scrolled = tokens ? tokens.scrollTop : null;
    const open = [...main.querySelectorAll("details")].map((each) => each.open);
    main.dataset.seen = fresh.innerHTML;
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

async function loop() {
  const seconds = Number(main.dataset.refreshS);
  if (!seconds) return;
  await new Promise((done) => setTimeout(done, 1000 * seconds));
  if (!busyReading()) {
    try { await refresh(); } catch { stale.hidden = false; }
  }
  loop();
}

async function send(event) {
  event.preventDefault();
  const form = event.target;
  const said = form.querySelector(".said-back");
  const wish = event.submitter ? event.submitter.value : "comments";
  const body = { by: form.elements.by.value };
  if (wish === "comments") body.text = form.elements.text.value;
  localStorage.setItem("gradloc-by", body.by);
  said.textContent = "Sending…";
  try {
    const answer = await fetch(`/api/v1/incidents/${form.dataset.incident}/${wish}`, {
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

function prepare(scrolled) {
  for (const card of main.querySelectorAll(".act")) card.hidden = false;
  for (const form of main.querySelectorAll("form[data-incident]")) {
    form.addEventListener("submit", send);
    form.elements.by.value = localStorage.getItem("gradloc-by") || "";
  }
  const tokens = main.querySelector(".tokens");
  const culprit = tokens && tokens.querySelector(".culprit");
  if (scrolled !== null && tokens) tokens.scrollTop = scrolled;
  else if (culprit) tokens.scrollTop = culprit.offsetTop - tokens.clientHeight / 2;
}

prepare(null);
loop();
