// The page: views, key, theme, and the stream of events that everything is drawn from.

import * as api from "./api.js";
import { byId } from "./dom.js";
import { redraw, showFleet } from "./fleet.js";
import { loadModels } from "./playground.js";
import { addRequest, drawRequests, resetRequests } from "./requests.js";
import { addDecision, drawRoutes, resetRoutes } from "./routes.js";

const VIEWS = ["fleet", "routes", "requests", "playground"];
const RETRY_MS = 2000;
const THEME = "tandem.theme";

/** The view that the address names. Its form names no element, so that the browser moves neither focus nor scroll. */
function asked() {
  const name = location.hash.slice(2);
  return VIEWS.includes(name) ? name : VIEWS[0];
}

function show(view, focus = false) {
  for (const name of VIEWS) {
    const on = name === view;
    const tab = byId(`tab-${name}`);
    byId(name).hidden = !on;
    tab.setAttribute("aria-selected", String(on));
    tab.tabIndex = on ? 0 : -1;
    if (on && focus) tab.focus();
  }
  if (asked() !== view) history.replaceState(null, "", `#/${view}`);
  drawRoutes();
  drawRequests();
  redraw();
}

for (const name of VIEWS) byId(`tab-${name}`).addEventListener("click", () => show(name));
document.querySelector('[role="tablist"]').addEventListener("keydown", (event) => {
  const at = VIEWS.findIndex((name) => !byId(name).hidden);
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (step) show(VIEWS.at((at + step) % VIEWS.length), true);
  else if (event.key === "Home") show(VIEWS[0], true);
  else if (event.key === "End") show(VIEWS.at(-1), true);
  else return;
  event.preventDefault();
});
addEventListener("hashchange", () => show(asked()));

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  redraw();
}
byId("theme-button").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const next = now === "dark" ? "light" : "dark";
  localStorage.setItem(THEME, next);
  setTheme(next);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

function link(state, text) {
  byId("link").className = `link ${state}`;
  byId("link").textContent = text;
}

function trouble(message) {
  byId("trouble").hidden = !message;
  byId("trouble").textContent = message;
}

const dialog = byId("key-dialog");
let keyChanged = () => {};

/** Asks for a key; resolves when one was given. */
function askKey() {
  link("off", "a key is needed");
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    keyChanged = resolve;
  });
}
byId("key-button").addEventListener("click", () => dialog.showModal());
dialog.addEventListener("close", () => {
  const given = byId("key").value.trim();
  if (dialog.returnValue === "ok" && given) {
    api.key.set(given);
    keyChanged();
  }
  byId("key").value = "";
});

const HANDLERS = {
  fleet: (value) => {
    link("on", "live");
    trouble("");
    showFleet(value);
  },
  route: addDecision,
  request: addRequest,
  trouble: (value) => {
    link("off", "router not reached");
    trouble(value.message);
  },
};

async function fill(path, reset) {
  try {
    reset((await api.get(path)).data);
  } catch (error) {
    if (error.status === 401) throw error;
    trouble(error.message);
  }
}

async function follow() {
  await fill("/tandem/requests?last=200", resetRequests);
  await fill("/tandem/routes?last=200", resetRoutes);
  loadModels().catch(() => {});
  for await (const { event, data } of api.stream("/tandem/events")) HANDLERS[event]?.(api.parse(data));
}

async function forever() {
  while (true) {
    try {
      await follow();
      link("off", "connection lost, trying again");
    } catch (error) {
      if (error.status === 401) await askKey();
      else link("off", "server not reached, trying again");
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

setTheme(localStorage.getItem(THEME));
show(asked());
forever();
