// The fleet: totals, live curves, one row per engine.

import { Chart, quantile } from "./chart.js";
import { DASH, byId, bytes, el, gauge, millis, percent, whole } from "./dom.js";

const WINDOW = 30;
const COLUMNS = 13;

const charts = {
  tps: new Chart("chart-tps", ["--a"]),
  ttft: new Chart("chart-ttft", ["--a", "--b"]),
  itl: new Chart("chart-itl", ["--a", "--b"]),
  shed: new Chart("chart-shed", ["--b"]),
};
let history = [];

/** Growth of a counter per second since the snapshot before; an engine that is new or restarted counts from 0. */
function rates(now, before) {
  const seconds = Math.max(0.05, (now.unix_ms - before.unix_ms) / 1000);
  const old = new Map(before.engines.map((engine) => [engine.address, engine]));
  const perEngine = new Map();
  for (const engine of now.engines) {
    const last = old.get(engine.address);
    if (engine.output_tokens === null) continue;
    const base = last && last.epoch === engine.epoch ? last.output_tokens : 0;
    perEngine.set(engine.address, Math.max(0, engine.output_tokens - base) / seconds);
  }
  const shed = Math.max(0, now.shed - before.shed) / seconds;
  return { perEngine, shed, total: [...perEngine.values()].reduce((sum, rate) => sum + rate, 0) };
}

function sum(engines, field) {
  return engines.reduce((total, engine) => total + (engine[field] ?? 0), 0);
}

function totals(now, rate) {
  const { engines } = now;
  const ready = engines.filter((engine) => engine.state === "ready").length;
  const prompt = sum(engines, "cached_tokens") + sum(engines, "prefill_tokens");
  const proposed = sum(engines, "drafts_proposed");
  const tiles = [
    ["engines ready", `${ready} of ${engines.length}`],
    ["running", whole(sum(engines, "running"))],
    ["waiting", whole(sum(engines, "waiting") + now.queued)],
    ["tokens/s", rate ? whole(rate.total) : DASH],
    ["cache hits", prompt ? percent(sum(engines, "cached_tokens") / prompt) : DASH],
    ["drafts accepted", proposed ? percent(sum(engines, "drafts_accepted") / proposed) : DASH],
    ["shed since start", whole(now.shed)],
  ];
  byId("totals").replaceChildren(...tiles.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function row(engine, rate) {
  const num = { class: "num" };
  const failures = engine.consecutive_failures;
  const breaker = engine.breaker === "open" ? `open (${failures})` : failures ? `closed (${failures} failed)` : "closed";
  const cells = el(
    "tr",
    { "data-engine": engine.name, "data-state": engine.state },
    el("td", { title: engine.address }, engine.name),
    el("td", {}, el("span", { class: `state ${engine.state}` }, engine.state)),
    el("td", {}, engine.model ?? DASH),
    el("td", num, `${whole(engine.running)} / ${whole(engine.max_num_seqs)}`),
    el("td", num, whole(engine.waiting)),
    el("td", { title: `${whole(engine.kv_blocks_used)} of ${whole(engine.kv_blocks_total)} blocks in use, ${whole(engine.kv_blocks_cached)} cached` }, gauge(engine.kv_use, "KV blocks in use")),
    el("td", num, percent(engine.hit_rate)),
    el("td", { class: "num", title: `${whole(engine.drafts_accepted)} of ${whole(engine.drafts_proposed)} since start` }, percent(engine.acceptance)),
    el("td", num, rate === undefined ? DASH : whole(rate)),
    el("td", num, bytes(engine.rss_bytes)),
    el("td", {}, breaker),
    el("td", {}, el("code", {}, engine.epoch?.slice(0, 8) ?? DASH)),
    el("td", { title: engine.numerics_id ?? "" }, el("code", {}, engine.numerics_id?.slice(0, 12) ?? DASH), engine.batch_invariant === false ? " best effort" : null),
  );
  const error = engine.last_error ? el("tr", { class: "problem" }, el("td", { colspan: COLUMNS }, `Last error of ${engine.name}: ${engine.last_error}`)) : null;
  return error ? [cells, error] : [cells];
}

function curves(now, before, rate) {
  const { latency } = now;
  const old = before.latency;
  const seconds = (histogram, q) => quantile(latency[histogram], old[histogram], q);
  for (const name of ["ttft", "itl"]) {
    const values = [seconds(name, 0.5), seconds(name, 0.99)].map((value) => (value === null ? null : value * 1000));
    charts[name].add(...values);
    byId(`now-${name}`).textContent = values.map(millis).join(" / ");
  }
  charts.tps.add(rate.total);
  charts.shed.add(rate.shed);
  byId("now-tps").textContent = whole(rate.total);
  byId("now-shed").textContent = rate.shed.toFixed(rate.shed < 10 ? 1 : 0);
}

/** Shows one snapshot. */
export function showFleet(now) {
  const before = history.at(-1);
  const rate = before ? rates(now, before) : null;
  totals(now, rate);
  const rows = now.engines.flatMap((engine) => row(engine, rate?.perEngine.get(engine.address)));
  const none = el("tr", {}, el("td", { colspan: COLUMNS }, "The router knows no engine."));
  byId("engines").tBodies[0].replaceChildren(...(rows.length ? rows : [none]));
  if (rate) curves(now, history[0], rate);
  history.push(now);
  if (history.length > WINDOW) history = history.slice(-WINDOW);
}

export function redraw() {
  Object.values(charts).forEach((chart) => chart.draw());
}
