// SPDX-License-Identifier: Apache-2.0
// Asks /dashboard/data once a second and shows it. Totals become rates here, from the answers that
// this page has kept. Everything is written as text, never as markup.
"use strict";

const POLL_MS = 1000, TIMEOUT_MS = 4000;
const RATE_S = 10, KEPT_S = 60;
const HEADS = {
  worker: ["Worker", "Running", "Waiting", "KV use", "Cache hits", "Output tok/s", "Prompt tok/s",
    "KV transfer"],
  latency: ["", "p50", "p90", "p99", "Requests"],
  route: ["Request", "Worker", "Cached tokens", "Scores", "Why"],
};
const histories = new Map(); // by worker: {generation, samples: [{at, stats}]}
const limits = { ttft: byId("ttft_ms"), tpot: byId("tpot_ms") };
let newest = null; // the last answer
let heardMs = performance.now();
let key = sessionStorage.getItem("pelton-key") || "";

function byId(id) { return document.getElementById(id); }

function make(tag, content = [], className = "") {
  const element = document.createElement(tag);
  element.append(...[content].flat());
  element.className = className;
  return element;
}

function row(kind, cells, className = "") {
  const made = make("tr", cells.map((cell) => make("td", cell)), className);
  [...made.children].forEach((cell, i) => { cell.dataset.label = HEADS[kind][i]; });
  return made;
}

function number(value, digits = 0) {
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

function percent(part, whole) { return whole ? `${number((100 * part) / whole)}%` : "–"; }

function gigabytes(bytes) {
  return (bytes / 1e9).toLocaleString("en", { maximumSignificantDigits: 3 });
}

function note(text) { return make("small", text); }

// History of a worker

function remember(card, at) {
  let history = histories.get(card.worker);
  const last = history && history.samples.at(-1);
  const isOther = !history || history.generation !== card.generation
    || (last && (at < last.at || (card.stats && card.stats.steps_total < last.stats.steps_total)));
  // Until a new process has spoken, what was last heard is the old one's.
  if (isOther && (card.stats || !history)) {
    history = { generation: card.generation, samples: [] };
    histories.set(card.worker, history);
  }
  if (card.state !== "up" && history.samples.length) return history;
  if (card.stats) history.samples.push({ at, stats: card.stats });
  while (history.samples.length && history.samples[0].at < at - KEPT_S) history.samples.shift();
  return history;
}

function growth(samples, seconds, read) {
  const last = samples.at(-1);
  const first = samples.find((sample) => sample.at >= last.at - seconds);
  return { by: read(last.stats) - read(first.stats), seconds: last.at - first.at };
}

function rate(samples, read) {
  const { by, seconds } = growth(samples, RATE_S, read);
  return seconds ? by / seconds : 0;
}

const READ = {
  output: (s) => s.generated_tokens_total,
  prompt: (s) => s.prompt_tokens_total,
  cached: (s) => s.cached_tokens_total,
  computed: (s) => s.prompt_tokens_total - s.cached_tokens_total,
  pulledBytes: (s) => s.pulled_bytes_total,
  copySeconds: (s) => s.pull_copy_s_total,
};

// Tables

function workerRow(card, { samples }, at) {
  const name = [make("b", `${card.worker} `), card.role, " ",
    make("span", card.state, `badge ${card.state}`)];
  if (!samples.length) return row("worker", [name]);
  const last = samples.at(-1), s = last.stats;
  if (card.is_draining) name.push(note("draining"));
  if (card.state !== "up") name.push(note(`as of ${number(at - last.at)} s ago`));
  else name.push(note(`${number(card.num_routed)} requests, process ${card.generation}`));
  const meter = make("meter");
  meter.value = s.num_blocks ? s.num_used_blocks / s.num_blocks : 0;
  const hits = (read) => growth(samples, KEPT_S, read).by;
  return row("worker", [
    name,
    [number(s.num_running), ...(s.num_receiving ? [note(`${s.num_receiving} receive KV`)] : [])],
    number(s.num_waiting),
    [meter, percent(s.num_used_blocks, s.num_blocks), note(`of ${number(s.num_blocks)} blocks`)],
    [percent(hits(READ.cached), hits(READ.prompt)),
      note(`${percent(s.cached_tokens_total, s.prompt_tokens_total)} in all`)],
    number(rate(samples, READ.output), 1),
    number(rate(samples, READ.computed), 1),
    transfers(card.role, samples, s),
  ], card.state === "up" ? "" : "stale");
}

function transfers(role, samples, s) {
  if (role === "mixed") return "–";
  if (role === "prefill") {
    return [`${number(s.prefills_total)} prompts`,
      note(`${number(s.num_leased_blocks)} blocks leased`)];
  }
  const pulled = growth(samples, KEPT_S, READ.pulledBytes).by;
  const copied = growth(samples, KEPT_S, READ.copySeconds).by;
  return [`${gigabytes(rate(samples, READ.pulledBytes))} GB/s`,
    ...(copied ? [note(`${gigabytes(pulled / copied)} GB/s while copying`)] : []),
    note(`${number(s.pulls_total)} pulls, ${gigabytes(s.pulled_bytes_total)} GB`),
    note(`${number(s.pull_fallbacks_total)} fallbacks`)];
}

function latencyRow(name, latency, input) {
  if (!latency) return row("latency", [name, "–", "–", "–", "0"]);
  const limitMs = input.value === "" || !input.validity.valid ? Infinity : Number(input.value);
  const cells = [latency.p50_s, latency.p90_s, latency.p99_s].map((seconds) => {
    const ms = seconds * 1000, text = `${number(ms, ms < 100 ? 1 : 0)} ms`;
    return ms > limitMs ? make("span", `${text}, over`, "over") : text;
  });
  return row("latency", [name, ...cells, number(latency.num_requests)]);
}

function routeRow(route, roles) {
  const scores = Object.entries(route.scores).sort((a, b) => a[1] - b[1]).map(
    ([worker, score]) => make("span", `${worker}: ${number(score, 1)}`,
      worker === route.worker ? "chosen" : ""));
  return row("route", [
    [make("code", route.request_id.slice(0, 24))],
    `${route.worker} ${roles.get(route.worker) || ""}`,
    route.cached_tokens === null ? "–" : number(route.cached_tokens),
    scores.length ? scores : "–",
    route.reason,
  ]);
}

function total(label, value) { return make("li", [make("b", value), label]); }

function show(data) {
  const shown = data.workers.map((card) => ({ card, history: remember(card, data.at_s) }));
  const up = shown.filter(({ card }) => card.state === "up");
  const outputRate = up.reduce((sum, { history }) => sum + rate(history.samples, READ.output), 0);
  byId("model").textContent = data.model;
  byId("totals").replaceChildren(
    total("workers up", `${up.length} of ${shown.length}`),
    total("requests live", number(data.num_live)),
    total("queued", number(data.num_queued)),
    total("output tok/s", number(outputRate, 1)),
    total("migrations", number(data.num_migrated)),
  );
  byId("workers").replaceChildren(
    ...shown.map(({ card, history }) => workerRow(card, history, data.at_s)));
  const roles = new Map(data.workers.map((card) => [card.worker, card.role]));
  byId("routes").replaceChildren(...data.routes.toReversed().map((r) => routeRow(r, roles)));
  showLatency(data);
  byId("data").hidden = false;
}

function showLatency(data) {
  byId("latency").replaceChildren(
    latencyRow("TTFT", data.ttft, limits.ttft), latencyRow("TPOT", data.tpot, limits.tpot));
}

// Polling

function setStatus(text, className, isStale) {
  byId("status").textContent = text;
  byId("status").className = `badge ${className}`;
  document.body.classList.toggle("stale", isStale);
}

async function fetchData() {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const signal = AbortSignal.timeout(TIMEOUT_MS);
  const reply = await fetch("dashboard/data", { headers, signal, cache: "no-store" });
  if (reply.status === 401) return null;
  if (!reply.ok) throw new Error(`status ${reply.status}`);
  return await reply.json();
}

async function poll() {
  let data;
  try {
    data = await fetchData();
  } catch (error) {
    const seconds = number((performance.now() - heardMs) / 1000);
    setStatus(`no answer for ${seconds} s, trying again`, "down", true);
    setTimeout(poll, POLL_MS);
    return;
  }
  if (data === null) {
    askForKey();
    return;
  }
  newest = data;
  heardMs = performance.now();
  setStatus(data.is_draining ? "shutting down" : "live", data.is_draining ? "silent" : "up", false);
  show(data);
  setTimeout(poll, POLL_MS);
}

function askForKey() {
  setStatus("waiting for the key", "silent", true);
  if (key) byId("key-text").textContent = "That is not this server's API key.";
  byId("key-form").hidden = false;
  byId("key").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value;
  sessionStorage.setItem("pelton-key", key);
  byId("key-form").hidden = true;
  poll();
});

// Limits stand in the address, so that a reload or a bookmark keeps them.
for (const input of Object.values(limits)) {
  input.value = new URLSearchParams(location.search).get(input.id) || "";
  input.addEventListener("input", () => {
    const given = new URLSearchParams(location.search);
    if (input.value) given.set(input.id, input.value); else given.delete(input.id);
    history.replaceState(null, "", `?${given}`);
    if (newest) showLatency(newest);
  });
}
byId("limits").addEventListener("submit", (event) => event.preventDefault());
for (const [kind, names] of Object.entries(HEADS)) {
  byId(`${kind}-head`).append(make("tr", names.map((name) => make("th", name))));
}
poll();
