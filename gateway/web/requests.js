// Finished requests with their receipts: why each took as long as it did.

import { DASH, byId, clock, eachFrame, el, facts, millis, moreRow, percent, shortName, whole } from "./dom.js";
import { candidates, decisionOf } from "./routes.js";

const MOST = 200;
const SVG = "http://www.w3.org/2000/svg";
const requests = [];
const open = new Set();

/** A bar of the time in queue, prefill and decode. */
function split(receipt) {
  const parts = [
    ["queue", receipt.queued_ms],
    ["prefill", receipt.prefill_ms],
    ["decode", receipt.decode_ms],
  ];
  const total = parts.reduce((sum, [, value]) => sum + value, 0) || 1;
  const text = parts.map(([name, value]) => `${name} ${millis(value)}`).join(", ");
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 100 1");
  svg.setAttribute("preserveAspectRatio", "none");
  let x = 0;
  for (const [name, value] of parts) {
    const box = document.createElementNS(SVG, "rect");
    const width = (value / total) * 100;
    for (const [key, number] of Object.entries({ x, y: 0, width, height: 1 })) box.setAttribute(key, number);
    box.setAttribute("class", `fill-${name}`);
    svg.append(box);
    x += width;
  }
  return el("div", { class: "split", role: "img", title: text, "aria-label": text }, svg);
}

/** One sentence on why the first token took so long. */
function why(request, receipt, decision) {
  const said = [];
  if (decision?.queued_ms >= 1) said.push(`waited ${millis(decision.queued_ms)} in the router for an engine with room`);
  if (decision?.attempt > 1) said.push(`was tried ${decision.attempt} times`);
  if (receipt.queued_ms >= 1) said.push(`waited ${millis(receipt.queued_ms)} in the engine for its first step`);
  if (receipt.preemptions) said.push(`was put back ${receipt.preemptions} times for want of KV blocks`);
  const cached = request.prompt_tokens ? request.cached_tokens / request.prompt_tokens : 0;
  said.push(`had ${percent(cached)} of its prompt in the cache, so ${request.prompt_tokens - request.cached_tokens} tokens were computed in ${millis(receipt.prefill_ms)}`);
  if (receipt.drafts_proposed) said.push(`took ${receipt.steps} steps, with ${receipt.drafts_accepted} of ${receipt.drafts_proposed} drafts accepted`);
  else said.push(`took ${receipt.steps} steps without drafts`);
  return `It ${said.join("; ")}.`;
}

/** Everything about one receipt. */
export function receiptFacts(receipt) {
  const proposers = Object.entries(receipt.accepted_by_proposer ?? {}).map(([name, count]) => `${name} ${count}`);
  return facts([
    ["engine", shortName(receipt.engine)],
    ["kernels", receipt.kernel_path],
    ["numerics", receipt.numerics_id],
    ["seed", receipt.seed],
    ["steps", receipt.steps],
    ["blocks from cache", receipt.cached_blocks],
    ["preempted", receipt.preemptions],
    ["attempts", receipt.attempts],
    ["drafts accepted", `${receipt.drafts_accepted} of ${receipt.drafts_proposed}`],
    ["by proposer", proposers.join(", ")],
  ]);
}

function more(request) {
  const decision = decisionOf(request.id);
  const parts = request.receipts.flatMap((receipt) => [el("p", {}, why(request, receipt, decision)), receiptFacts(receipt)]);
  if (!parts.length) parts.push(el("p", {}, `It has no receipt: it ended with ${request.reason || "an error"}.`));
  if (decision) parts.push(el("p", {}, `Route: ${decision.reason}.`), candidates(decision));
  return parts;
}

function rows(request) {
  const num = { class: "num" };
  const shown = open.has(request.id);
  const button = el("button", { class: "row", type: "button", "aria-expanded": String(shown), "data-id": request.id }, request.id.slice(0, 16));
  const line = el(
    "tr",
    { "data-key": request.id, class: shown ? "open" : null },
    el("td", {}, clock(request.unix_ms)),
    el("td", { title: request.id }, button),
    el("td", {}, request.path.replace(/^\/v1\//, "")),
    el("td", num, String(request.status)),
    el("td", { title: request.engine }, shortName(request.engine) || DASH),
    el("td", num, whole(request.prompt_tokens)),
    el("td", num, whole(request.cached_tokens)),
    el("td", num, whole(request.completion_tokens)),
    el("td", num, millis(request.ttft_ms)),
    el("td", num, millis(request.ms)),
    el("td", {}, request.receipts.length ? split(request.receipts[0]) : DASH),
    el("td", {}, request.reason || DASH),
  );
  return shown ? [line, moreRow(12, ...more(request))] : [line];
}

export const drawRequests = eachFrame(() => {
  if (byId("requests").hidden) return;
  const focused = document.activeElement?.dataset?.id;
  const body = byId("finished").tBodies[0];
  const all = requests.toReversed().flatMap(rows);
  body.replaceChildren(...(all.length ? all : [el("tr", {}, el("td", { colspan: 12 }, "No request has ended yet."))]));
  if (focused) body.querySelector(`button[data-id="${CSS.escape(focused)}"]`)?.focus();
});

export function addRequest(request) {
  requests.push(request);
  if (requests.length > MOST) requests.shift();
  drawRequests();
}

export function resetRequests(all) {
  requests.length = 0;
  all.forEach(addRequest);
  drawRequests();
}

byId("finished").addEventListener("click", (event) => {
  const id = event.target.closest("tr[data-key]")?.dataset.key;
  if (!id) return;
  if (!open.delete(id)) open.add(id);
  drawRequests();
});
