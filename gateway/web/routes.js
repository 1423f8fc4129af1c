// The router's last decisions, with everything that was considered.

import { DASH, byId, clock, eachFrame, el, millis, moreRow, whole } from "./dom.js";

const MOST = 200;
const decisions = [];
const byRequest = new Map();
const open = new Set();
let numbers = 0;

/** The last decision for a request of this id, if one is known. */
export const decisionOf = (id) => byRequest.get(id);

/** A table of the engines that were considered. */
export function candidates(decision) {
  const names = [...new Set(decision.candidates.flatMap((one) => Object.keys(one.parts)))];
  const head = ["engine", "blocks held", "predicted", ...names, "not taken because"];
  const rows = decision.candidates.map((one) =>
    el(
      "tr",
      {},
      el("td", { title: one.address }, one.address === decision.chosen ? el("strong", {}, `${one.name} ✓`) : one.name),
      el("td", { class: "num" }, whole(one.matched_blocks)),
      el("td", { class: "num" }, millis(one.predicted_ms)),
      ...names.map((name) => el("td", { class: "num" }, millis(one.parts[name]))),
      el("td", {}, one.excluded || DASH),
    ),
  );
  return el("table", {}, el("thead", {}, el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, ...rows));
}

function rows(decision) {
  const num = { class: "num" };
  const shown = open.has(decision.number);
  const button = el("button", { class: "row", type: "button", "aria-expanded": String(shown), "data-number": decision.number }, decision.request_id.slice(0, 16) || "(another key's)");
  const line = el(
    "tr",
    { "data-key": decision.number, class: shown ? "open" : null },
    el("td", {}, clock(decision.unix_ms)),
    el("td", { title: decision.request_id }, button),
    el("td", { title: decision.chosen }, decision.name || "nobody"),
    el("td", { class: "wide" }, decision.reason),
    el("td", num, whole(decision.prompt_tokens)),
    el("td", num, whole(decision.cached_tokens)),
    el("td", num, millis(decision.queued_ms)),
    el("td", num, millis(decision.ttft_ms)),
    el("td", num, whole(decision.attempt)),
    el("td", {}, decision.outcome || "running"),
  );
  return shown ? [line, moreRow(10, candidates(decision))] : [line];
}

export const drawRoutes = eachFrame(() => {
  if (byId("routes").hidden) return;
  const focused = document.activeElement?.dataset?.number;
  const body = byId("decisions").tBodies[0];
  const all = decisions.toReversed().flatMap(rows);
  body.replaceChildren(...(all.length ? all : [el("tr", {}, el("td", { colspan: 10 }, "Nothing was routed yet."))]));
  if (focused) body.querySelector(`button[data-number="${focused}"]`)?.focus();
});

export function addDecision(decision) {
  decision.number = ++numbers;
  decisions.push(decision);
  if (decision.request_id) byRequest.set(decision.request_id, decision);
  if (decisions.length > MOST) byRequest.delete(decisions.shift().request_id);
  drawRoutes();
}

export function resetRoutes(all) {
  decisions.length = 0;
  byRequest.clear();
  all.forEach(addDecision);
  drawRoutes();
}

byId("decisions").addEventListener("click", (event) => {
  const number = Number(event.target.closest("tr[data-key]")?.dataset.key);
  if (!number) return;
  if (!open.delete(number)) open.add(number);
  drawRoutes();
});
