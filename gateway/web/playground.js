// Chat with every sampling field; each token in the colour of who wrote it.

import * as api from "./api.js";
import { byId, el, millis, percent } from "./dom.js";
import { receiptFacts } from "./requests.js";
import { candidates } from "./routes.js";

// Name, label, kind, further attributes. An empty field is not sent, so the server's default holds.
const FIELDS = [
  ["model", "model", "select", {}],
  ["system", "system prompt", "area", { long: true }],
  ["max_tokens", "max tokens", "int", { min: 1, value: 256 }],
  ["min_tokens", "min tokens", "int", { min: 0 }],
  ["temperature", "temperature", "number", { min: 0, max: 2, step: 0.05 }],
  ["top_p", "top p", "number", { min: 0, max: 1, step: 0.01 }],
  ["top_k", "top k", "int", { min: -1 }],
  ["min_p", "min p", "number", { min: 0, max: 1, step: 0.01 }],
  ["seed", "seed", "bigint", {}],
  ["n", "choices", "int", { min: 1, max: 8 }],
  ["repetition_penalty", "repetition penalty", "number", { min: 0.01, step: 0.01 }],
  ["frequency_penalty", "frequency penalty", "number", { min: -2, max: 2, step: 0.05 }],
  ["presence_penalty", "presence penalty", "number", { min: -2, max: 2, step: 0.05 }],
  ["priority", "priority", "int", {}],
  ["stop", "stop strings, one a line", "lines", { long: true }],
  ["bad_words", "bad words, one a line", "lines", { long: true }],
  ["stop_token_ids", "stop token ids", "ids", {}],
  ["allowed_token_ids", "allowed token ids", "ids", {}],
  ["logit_bias", "logit bias, JSON", "json", { long: true }],
  ["response_format", "response format, JSON", "json", { long: true }],
  ["guided_regex", "regular expression", "text", { long: true }],
  ["cache_salt", "cache salt", "text", {}],
  ["truncate_prompt_tokens", "truncate prompt", "int", { min: -1 }],
  ["ignore_eos", "ignore end tokens", "check", {}],
  ["skip_special_tokens", "keep special tokens", "inverse", {}],
];

const form = byId("options");
const log = byId("log");
let messages = [];
let running = null;

function input(kind, attributes) {
  const { long, ...rest } = attributes;
  if (kind === "select") return el("select", rest);
  if (kind === "area" || kind === "lines" || kind === "json") return el("textarea", { rows: kind === "area" ? 2 : 1, ...rest });
  if (kind === "check" || kind === "inverse") return el("input", { type: "checkbox" });
  if (kind === "int") return el("input", { type: "number", step: 1, ...rest });
  if (kind === "number") return el("input", { type: "number", ...rest });
  if (kind === "bigint") return el("input", { type: "text", inputmode: "numeric", pattern: "-?[0-9]+", ...rest });
  return el("input", { type: "text", ...rest });
}

for (const [name, label, kind, attributes] of FIELDS) {
  const field = input(kind, attributes);
  field.name = name;
  form.append(el("label", { class: attributes.long ? "long" : null }, label, field));
}
form.addEventListener("submit", (event) => event.preventDefault());

function read(kind, field) {
  if (kind === "check") return field.checked ? true : undefined;
  if (kind === "inverse") return field.checked ? false : undefined;
  const text = field.value.trim();
  if (!text) return undefined;
  if (kind === "int" || kind === "number") return Number(text);
  if (kind === "lines") return field.value.split("\n").filter(Boolean);
  if (kind === "ids") return text.split(/[\s,]+/).map(Number);
  if (kind === "json") return JSON.parse(text);
  return text;
}

/** The request's body. Throws with the field's name where its text is not valid. */
function bodyOf() {
  const body = { messages: [...messages] };
  for (const [name, label, kind] of FIELDS) {
    const field = form.elements[name];
    if (!field.checkValidity()) throw new Error(`${label}: ${field.validationMessage}`);
    let value;
    try {
      value = read(kind, field);
    } catch (error) {
      throw new Error(`${label}: ${error.message}`);
    }
    if (value === undefined) continue;
    if (name === "system") body.messages.unshift({ role: "system", content: value });
    // A seed of 64 bits has no exact number here: it is put into the text below.
    else if (name === "seed") body.seed = JSON.rawJSON ? JSON.rawJSON(BigInt(value).toString()) : Number(value);
    else body[name] = value;
  }
  return body;
}

export async function loadModels() {
  const select = form.elements.model;
  const chosen = select.value;
  const { data } = await api.get("/v1/models");
  select.replaceChildren(...data.map((model) => el("option", { value: model.id }, model.id)));
  if (data.some((model) => model.id === chosen)) select.value = chosen;
}

function turn(who, text = "") {
  const body = el("span", { class: "text" }, text);
  const box = el("div", { class: "turn", "data-who": who }, el("span", { class: "who" }, who), body);
  log.append(box);
  log.scrollTop = log.scrollHeight;
  return body;
}

/** Counts tokens and times of one answer. */
class Meter {
  constructor() {
    this.started = performance.now();
    this.first = null;
    this.tokens = 0;
    this.drafted = 0;
  }

  add(sources) {
    this.first ??= performance.now();
    this.tokens += sources.length;
    this.drafted += sources.filter((source) => source === "draft").length;
  }

  text() {
    if (this.first === null) return `waiting ${millis(performance.now() - this.started)}`;
    const seconds = (performance.now() - this.first) / 1000;
    const rate = this.tokens > 1 && seconds > 0 ? `${((this.tokens - 1) / seconds).toFixed(1)} tok/s` : "";
    const share = this.tokens ? `${percent(this.drafted / this.tokens)} from drafts` : "";
    return [`first token ${millis(this.first - this.started)}`, `${this.tokens} tokens`, rate, share].filter(Boolean).join(" · ");
  }
}

function show(places, choice, meter) {
  const sources = choice.token_sources ?? [];
  if (sources.length) meter.add(sources);
  const { content, reasoning_content: reasoning } = choice.delta;
  const text = content || reasoning;
  if (!text) return;
  while (places.length <= choice.index) places.push(turn(`assistant, choice ${places.length + 1}`));
  const kind = sources.at(-1) ?? "";
  places[choice.index].append(el("span", { class: `tok ${kind}${reasoning ? " reasoning" : ""}` }, text));
  if (content) places[choice.index].dataset.content = (places[choice.index].dataset.content ?? "") + content;
  log.scrollTop = log.scrollHeight;
}

async function answer(body) {
  const places = [turn("assistant")];
  const meter = new Meter();
  const live = byId("live");
  const ticking = setInterval(() => (live.textContent = meter.text()), 200);
  let receipt = null;
  try {
    const request = { ...body, stream: true, receipt: true, return_token_sources: true, stream_options: { include_usage: true } };
    for await (const { data } of api.stream("/v1/chat/completions", { body: request, signal: running.signal })) {
      if (data === "[DONE]") break;
      const chunk = api.parse(data);
      if (chunk.error) throw new api.ApiError(500, chunk.error.message, chunk.error.code);
      if (chunk.receipt) receipt = chunk.receipt;
      for (const choice of chunk.choices) show(places, choice, meter);
    }
  } finally {
    clearInterval(ticking);
    live.textContent = meter.text();
    const content = places[0].dataset.content;
    if (content) messages.push({ role: "assistant", content });
    else if (messages.at(-1)?.role === "user") messages.pop();
  }
  if (receipt) log.append(el("details", {}, el("summary", {}, "Receipt"), receiptFacts(receipt)));
}

function fail(error) {
  if (error.name === "AbortError") turn("stopped");
  else turn("error", error.message).parentElement.classList.add("error");
}

async function sendMessage() {
  const box = byId("message");
  const text = box.value.trim();
  if (!text || running) return;
  messages.push({ role: "user", content: text });
  turn("you", text);
  running = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  box.value = "";
  try {
    await answer(bodyOf());
  } catch (error) {
    fail(error);
    if (messages.at(-1)?.role === "user") messages.pop();
    if (!box.value) box.value = text;
  } finally {
    running = null;
    byId("send").disabled = false;
    byId("stop").disabled = true;
  }
}

async function explain() {
  const text = byId("message").value.trim();
  try {
    const body = bodyOf();
    if (text || !body.messages.length) body.messages.push({ role: "user", content: text || "…" });
    const decision = await api.post("/tandem/explain", body);
    const where = decision.chosen ? `It would go to ${decision.name}: ${decision.reason}.` : `${decision.reason}.`;
    log.append(el("div", { class: "turn scroll" }, el("span", { class: "who" }, "router"), where, candidates(decision)));
    log.scrollTop = log.scrollHeight;
  } catch (error) {
    fail(error);
  }
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  sendMessage();
});
byId("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    sendMessage();
  }
});
byId("playground").addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("explain").addEventListener("click", explain);
byId("clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  log.replaceChildren();
  byId("live").textContent = "";
  byId("message").focus();
});
byId("colour").addEventListener("change", (event) => log.classList.toggle("coloured", event.target.checked));
log.classList.add("coloured");
