"use strict";
// The live page. Everything from outside becomes text or a number, never markup.
const POLL_MS = 2000, KEPT = 450, STALE_MS = 7000;
const app = document.getElementById("app");
const samples = [];
let stats = null, heardMs = 0, problem = "", token = sessionStorage.getItem("kvstore-token") || "";

function h(tag, attributes, ...children) {
  const one = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "width") one.style.width = value; else one.setAttribute(name, value);
  }
  one.append(...children.flat().filter((child) => child !== null));
  return one;
}
function s(tag, attributes, text) {
  const one = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) one.setAttribute(name, value);
  if (text !== undefined) one.textContent = text;
  return one;
}

const sum = (values) => Object.values(values).reduce((total, value) => total + value, 0);
const plain = (value) => value.toLocaleString("en", {maximumFractionDigits: value < 10 ? 1 : 0});
const percent = (value) => (100 * value).toLocaleString("en", {maximumFractionDigits: 1}) + " %";
function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let power = 0;
  while (value >= 1024 && power < units.length - 1) { value /= 1024; power += 1; }
  return plain(value) + " " + units[power];
}
function duration(seconds) {
  if (seconds < 60) return plain(seconds) + " s";
  if (seconds < 3600) return plain(seconds / 60) + " min";
  if (seconds < 172800) return plain(seconds / 3600) + " h";
  return plain(seconds / 86400) + " days";
}
const NO_LOOKUPS = "no lookups yet";
const words = (name) => name.replaceAll("_", " ");
const TIER_KINDS = {host: "host", disk: "tight", remote: "int4"};
const CODEC_KINDS = {int4: "int4", raw: "full", int8k: "host"};
const SPARE_KINDS = ["work", "full", "ample", "tight"];
const kindOf = (known, name, at) => known[name] || SPARE_KINDS[at % SPARE_KINDS.length];

// what has changed over the last so many seconds
function span(seconds) {
  const last = samples[samples.length - 1];
  if (!last) return null;
  const first = samples.find((one) => one.time_seconds >= last.time_seconds - seconds) || last;
  return {first, last, seconds: last.time_seconds - first.time_seconds};
}
function rate(pick, seconds) {
  const one = span(seconds);
  return one && one.seconds > 0 ? (pick(one.last) - pick(one.first)) / one.seconds : 0;
}
function hitRatio(seconds) {
  const one = span(seconds);
  const asked = one ? one.last.asked_blocks - one.first.asked_blocks : 0;
  return asked > 0 ? (sum(one.last.hit_blocks) - sum(one.first.hit_blocks)) / asked : null;
}

// charts --------------------------------------------------------------------------------------------------------------
const W = 420, H = 220, LEFT = 66, RIGHT = 14, TOP = 14, BOTTOM = 26;
function steps(largest, binary) {
  if (!(largest > 0)) return [0, 1];
  const raw = largest / 3, power = 10 ** Math.floor(Math.log10(raw));
  const step = binary ? 2 ** Math.max(0, Math.ceil(Math.log2(raw)))
    : [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw * 0.999);
  const found = [];
  for (let value = 0; found.length === 0 || found[found.length - 1] < largest * 0.9999; value += step) found.push(value);
  return found;
}
function chart(title, series, {stacked = false, limit = null, label = plain, binary = false, top = 0, empty = "nothing yet"} = {}) {
  const drawn = series.filter((one) => one.points.length > 1);
  const box = h("figure", {class: "card"}, h("h3", {}, title));
  if (!drawn.length) { box.append(h("p", {class: "empty"}, empty)); return box; }
  const times = drawn[0].points.map((point) => point[0]);
  const t0 = times[0], t1 = times[times.length - 1];
  const floor = times.map(() => 0);
  const bands = drawn.map((one) => {
    const below = floor.slice();
    const above = one.points.map((point, at) => (stacked ? (floor[at] += point[1]) : point[1]));
    return {one, below, above};
  });
  const largest = Math.max(top, limit ? limit.value * 1.05 : 0, ...bands.flatMap((band) => band.above));
  const ticks = steps(largest, binary), highest = ticks[ticks.length - 1];
  const x = (time) => LEFT + (W - LEFT - RIGHT) * (time - t0) / Math.max(1, t1 - t0);
  const y = (value) => H - BOTTOM - (H - TOP - BOTTOM) * value / highest;
  const svg = s("svg", {viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title});
  for (const tick of ticks) {
    svg.append(s("line", {class: "grid", x1: LEFT, x2: W - RIGHT, y1: y(tick), y2: y(tick)}));
    svg.append(s("text", {x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end"}, label(tick)));
  }
  svg.append(s("text", {x: LEFT, y: H - 6}, duration(t1 - t0) + " ago"));
  svg.append(s("text", {x: W - RIGHT, y: H - 6, "text-anchor": "end"}, "now"));
  for (const {one, below, above} of bands) {
    const line = times.map((time, at) => `${x(time).toFixed(1)},${y(above[at]).toFixed(1)}`);
    if (stacked) {
      const back = times.map((time, at) => `${x(time).toFixed(1)},${y(below[at]).toFixed(1)}`).reverse();
      svg.append(s("polygon", {class: "area " + one.kind, points: [...line, ...back].join(" ")}));
    } else svg.append(s("polyline", {class: "line " + one.kind, points: line.join(" ")}));
  }
  if (limit) {
    svg.append(s("line", {class: "limit", x1: LEFT, x2: W - RIGHT, y1: y(limit.value), y2: y(limit.value)}));
    svg.append(s("text", {class: "axis", x: W - RIGHT, y: y(limit.value) - 4, "text-anchor": "end"}, limit.name));
  }
  const last = (band) => band.above[times.length - 1] - (stacked ? band.below[times.length - 1] : 0);
  box.append(svg, h("ul", {class: "legend"}, bands.map((band) =>
    h("li", {}, h("span", {class: "swatch " + band.one.kind}), `${band.one.name} ${label(last(band))}`))));
  return box;
}
function thinned() {
  const step = Math.max(1, Math.ceil(samples.length / 110));
  return samples.filter((_, at) => (samples.length - 1 - at) % step === 0);
}
// those that have a colour of their own first, in its order, then the rest by name
function namesOf(few, known, pick) {
  const own = Object.keys(known), place = (name) => (own.includes(name) ? own.indexOf(name) : own.length);
  return [...new Set(few.flatMap((one) => Object.keys(pick(one))))].sort((a, b) => place(a) - place(b) || (a < b ? -1 : 1));
}
function gauges(few, known, pick) {
  return namesOf(few, known, pick).map((name, at) => ({name: words(name), kind: kindOf(known, name, at),
    points: few.map((one) => [one.time_seconds, pick(one)[name] || 0])}));
}
// where nothing was asked a ratio is what it was, not 0
function rates(few, known, pick, per) {
  return namesOf(few, known, pick).map((name, at) => {
    let now = 0;
    return {name: words(name), kind: kindOf(known, name, at), points: few.slice(1).map((one, before) => {
      const risen = (pick(one)[name] || 0) - (pick(few[before])[name] || 0), over = per(one, few[before]);
      if (over > 0) now = risen / over;
      return [one.time_seconds, now];
    })};
  });
}
function charts() {
  const few = thinned(), latest = samples[samples.length - 1];
  const seconds = (one, before) => one.time_seconds - before.time_seconds;
  const asked = (one, before) => one.asked_blocks - before.asked_blocks;
  const moved = {stored: "full", read: "int4", spilled: "tight", fetched: "host"};
  const memory = gauges(few, CODEC_KINDS, (one) => one.codec_bytes);
  const lower = gauges(few, TIER_KINDS, (one) => one.lower_bytes);
  const limit = latest ? {name: "limit " + bytes(latest.limit_bytes), value: latest.limit_bytes} : null;
  const found = [
    chart("Shared memory by class", memory, {stacked: true, limit, label: bytes, binary: true}),
    chart("Hit ratio by tier", rates(few, TIER_KINDS, (one) => one.hit_blocks, asked), {stacked: true, label: percent, top: 1,
      empty: stats.lookups.asked_blocks ? "no hits yet" : NO_LOOKUPS}),
    chart("Bytes moved a second", rates(few, moved, (one) => one.moved_bytes, seconds), {label: bytes, binary: true}),
    chart("Queued copies", gauges(few, {"disk spill": "tight", "disk fetch": "full", "remote spill": "int4", "remote fetch": "host"},
      (one) => one.queues)),
  ];
  if (latest && latest.saved_prefill_seconds) {
    const saved = (one) => ({"seconds of prefill": one.saved_prefill_seconds});
    found.push(chart("TTFT saved, seconds a second", rates(few, {"seconds of prefill": "full"}, saved, seconds)));
  }
  if (lower.length) found.splice(1, 0, chart("Below shared memory", lower, {label: bytes, binary: true}));
  return h("div", {class: "grid wide"}, found);
}

// tables and tiles ----------------------------------------------------------------------------------------------------
function bar(share, kind) {
  const full = Math.max(0, Math.min(1, share));
  return h("div", {class: "track"}, h("span", {class: "piece " + kind, width: (100 * full).toFixed(1) + "%"}));
}
function table(heads, rows, texts = 1) {
  if (!rows.length) return h("p", {class: "empty"}, "none");
  const cell = (tag) => (value, at) => h(tag, {class: (at < texts ? "text" : "") + (heads[at] ? "" : " roomy"),
    "data-head": heads[at]}, value);
  return h("div", {class: "scroll"}, h("table", {}, h("thead", {}, h("tr", {}, heads.map(cell("th")))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map(cell("td")))))));
}
function tile(value, name, bad) {
  return h("div", {class: "card tile"}, h("b", {class: bad ? "mark no" : ""}, value), h("span", {}, name));
}
function corrupt() {
  const all = [stats.counts, ...Object.values(stats.tiers).map((one) => one.counts || {})].flatMap(Object.entries);
  return all.reduce((total, [name, count]) => total + (name.startsWith("corrupt_") ? count : 0), 0);
}
const damaged = () => Object.values(stats.tiers).reduce((total, one) => total + sum(one.damaged_copies || {}), 0);
const causes = (counts) => Object.entries(counts).sort((a, b) => b[1] - a[1]).map(([name, count]) => `${words(name)} ${plain(count)}`).join(", ");
const RECENT_SECONDS = 300, USUAL = ["throttled", "stale"];
function refusedOfLate() {
  const one = span(RECENT_SECONDS);
  if (!one) return {};
  const risen = Object.entries(one.last.refused || {}).map(([name, count]) => [name, count - ((one.first.refused || {})[name] || 0)]);
  return Object.fromEntries(risen.filter(([name, count]) => count > 0 && !USUAL.includes(name)));
}
function troubles() {
  const found = [];
  if (!stats.ready) found.push("The daemon is not ready: no client can connect.");
  for (const [name, one] of Object.entries(stats.tiers)) {
    if (one.state === "down") found.push(`Tier ${name} is down: its copies are misses, and new ones do not reach it.`);
    if (one.state === "dropped") found.push(`Tier ${name} was dropped by an operator; a restart brings it back.`);
    const counts = one.counts || {}, wrong = one.damaged_copies || {}, anew = Object.keys(one.index_dropped || {});
    if (sum(wrong)) found.push(`Tier ${name} gave back ${plain(sum(wrong))} damaged copies (${causes(wrong)}). None was served; look at what it is stored on, and who else writes there.`);
    if (anew.length) found.push(`Tier ${name} began anew, empty, at this start: its index could not be used (${anew.map(words).join(", ")}).`);
    if (counts.spills_dropped) found.push(`Tier ${name} was too slow for ${plain(counts.spills_dropped)} copies: dropped from its queue.`);
  }
  if (corrupt()) found.push(`${plain(corrupt())} copies in shared memory had wrong bytes. None was served; some client writes where it should not.`);
  if (sum(refusedOfLate())) found.push(`Refused or delayed in the last ${duration(RECENT_SECONDS)}: ${causes(refusedOfLate())}.`);
  if (stats.leases.quarantined_slots) found.push(`${plain(stats.leases.quarantined_slots)} slots are held by writers that neither finished nor died.`);
  for (const [name, one] of Object.entries(stats.tenants)) {
    if (one.counts.quota_refused) found.push(`Tenant ${name || "(unnamed)"} was refused ${plain(one.counts.quota_refused)} copies by its quota.`);
  }
  const list = found.map((text) => h("li", {}, text));
  return h("ul", {class: "troubles"}, list.length ? list : h("li", {class: "fine"}, "Nothing is wrong that this daemon knows of."));
}
function tiles() {
  const host = stats.tiers.host, now = hitRatio(60), total = stats.lookups, read = rate((one) => one.moved_bytes.read, 20);
  return h("div", {class: "tiles"},
    ...(total.asked_blocks
      ? [tile(now === null ? "no lookups" : percent(now), "hit ratio, last minute"),
        tile(percent(sum(total.hit_blocks) / total.asked_blocks), "hit ratio since start")]
      : [tile(NO_LOOKUPS, "hit ratio, last minute"), tile(NO_LOOKUPS, "hit ratio since start")]),
    tile(bytes(host.used_bytes), "of " + bytes(host.capacity_bytes) + " shared memory"),
    tile(total.saved_prefill_seconds ? duration(total.saved_prefill_seconds) : plain(total.reused_tokens),
      total.saved_prefill_seconds ? `of TTFT saved, ${plain(total.reused_tokens)} tokens` : "tokens reused"),
    tile(plain(rate((one) => one.lookups, 20)), "lookups a second"),
    tile(bytes(read) + "/s", "read by clients"),
    tile(plain(stats.connections), "clients"),
    tile(plain(corrupt() + damaged()), "wrong copies caught", corrupt() + damaged() > 0));
}
function tiers() {
  const rows = Object.entries(stats.tiers).map(([name, one]) => {
    const counts = one.counts || {}, queues = one.queues || {};
    const bad = one.state !== "ok", failed = Object.entries(counts).filter(([cause]) => /^(failed|spills_failed|fetch_)/.test(cause));
    return [name, h("span", {class: bad ? "pill bad" : "pill"}, bad ? one.state : "up"),
      bytes(one.used_bytes), one.capacity_bytes ? bytes(one.capacity_bytes) : "–",
      one.capacity_bytes ? bar(one.used_bytes / one.capacity_bytes, kindOf(TIER_KINDS, name, 0)) : "",
      name === "host" ? "–" : `${plain(queues.spill || 0)} / ${plain(queues.fetch || 0)}`,
      name === "host" ? "–" : `${bytes(counts.spilled_bytes || 0)} / ${bytes(counts.fetched_bytes || 0)}`,
      name === "host" ? "–" : `${plain(counts.spills_dropped || 0)} / ${plain(sum(Object.fromEntries(failed)))}`];
  });
  return table(["tier", "health", "used", "budget", "", "queued down / up", "moved down / up", "dropped / failed"], rows, 2);
}
function misses() {
  const causes = Object.entries(stats.lookups.missed_blocks).sort((a, b) => b[1] - a[1]);
  const meaning = {never_stored: "never stored here", evicted: "evicted: more memory would help", still_looking: "a lower tier was still looking",
    tier_down: "a lower tier was down"};
  const largest = Math.max(1, ...causes.map((one) => one[1]));
  if (!causes.length) return h("p", {class: "empty"}, stats.lookups.asked_blocks ? "none" : NO_LOOKUPS);
  return h("div", {}, causes.map(([cause, blocks]) => h("div", {class: "bar"},
    h("div", {class: "bar-name"}, h("span", {}, meaning[cause] || words(cause)), h("span", {}, plain(blocks) + " blocks")),
    h("div", {class: "track"}, h("span", {class: "piece work", width: (100 * blocks / largest).toFixed(1) + "%"})))));
}
function tenants() {
  const rows = Object.entries(stats.tenants).sort((a, b) => b[1].used_bytes - a[1].used_bytes).slice(0, 30).map(([name, one]) => {
    const hit = one.counts.hit_blocks || 0, asked = hit + (one.counts.missed_blocks || 0);
    return [name || "(unnamed)", bytes(one.used_bytes), one.quota_bytes ? bytes(one.quota_bytes) : "none",
      one.quota_bytes ? bar(one.used_bytes / one.quota_bytes, "full") : "", asked ? percent(hit / asked) : "–", plain(one.counts.quota_refused || 0)];
  });
  return table(["tenant", "used", "quota", "", "hit ratio", "refused"], rows);
}
function prefixes() {
  const now = stats.time_seconds;
  return table(["root", "first block", "tenant", "lookups", "blocks reused", "longest", "last"], stats.prefixes.slice(0, 12).map((one) =>
    [h("code", {}, one.root), h("code", {}, one.block), one.tenant || "(unnamed)", plain(one.lookups), plain(one.hit_blocks),
      plain(one.longest_tokens) + " tokens", now - one.last_seconds < 1 ? "now" : duration(now - one.last_seconds) + " ago"]), 3);
}
function pins() {
  return table(["pin", "domain", "root", "first block", "copies", "bytes", "time left"], stats.pins.map((one) =>
    [one.name, one.domain || "own", h("code", {}, one.root), h("code", {}, one.block), plain(one.copies),
      bytes(one.pinned_bytes), duration(one.seconds_left)]), 4);
}
function clients() {
  return table(["client", "process", "user", "requests", "refused", "reading", "writing", "pinned", "prefill"], stats.clients.slice(0, 64).map((one) =>
    [one.name + (one.quarantined ? " (quarantined)" : ""), String(one.pid), String(one.uid), plain(one.requests), plain(one.refused),
      plain(one.read_copies), plain(one.write_slots), plain(one.pinned_copies),
      one.prefill_tokens_per_second ? plain(one.prefill_tokens_per_second) + " tokens/s" : "–"]));
}

function turnedAway() {
  return sum(stats.refused || {}) ? h("p", {class: "empty", id: "refused"}, `Refused, delayed or slowed since start: ${causes(stats.refused)}.`) : null;
}

// the page ------------------------------------------------------------------------------------------------------------
function header() {
  const silent = Date.now() - heardMs > STALE_MS;
  const pill = problem ? h("span", {class: "pill bad", id: "state"}, problem)
    : silent ? h("span", {class: "pill warn", id: "state"}, "no news for " + duration((Date.now() - heardMs) / 1000))
    : h("span", {class: stats && stats.ready ? "pill" : "pill warn", id: "state"}, stats && stats.ready ? "ready" : "not ready");
  const since = stats ? h("span", {class: "soft"}, `up ${duration(stats.uptime_seconds)} · process ${stats.pid} · boot ${stats.boot.slice(0, 8)}`) : null;
  return h("header", {}, h("h1", {}, "KV cache"), pill, since);
}
function asking() {
  const field = h("input", {type: "password", placeholder: "token", autocomplete: "off", "aria-label": "token"});
  const form = h("form", {}, field, h("button", {}, "Show"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    token = field.value.trim();
    sessionStorage.setItem("kvstore-token", token);
    poll();
  });
  return h("div", {class: "card"}, h("p", {}, "This daemon wants its token (setting http_token)."), form);
}
function render() {
  if (problem === "token wanted") {
    if (!app.querySelector("form")) app.replaceChildren(header(), asking());
    return;
  }
  if (!stats) { app.replaceChildren(header()); return; }
  const scrolled = [...app.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
  app.replaceChildren(header(), troubles(), tiles(),
    h("h2", {}, "Tiers"), h("div", {class: "card", id: "tiers"}, tiers()),
    h("h2", {}, "Over time"), charts(),
    h("h2", {}, "Misses by cause"), h("div", {class: "card", id: "misses"}, misses()),
    h("h2", {}, "Tenants and quotas"), h("div", {class: "card", id: "tenants"}, tenants()),
    h("h2", {}, "Prefixes that are used again"), h("div", {class: "card", id: "prefixes"}, prefixes()),
    h("h2", {}, "Pinned by operators"), h("div", {class: "card", id: "pins"}, pins()),
    h("h2", {}, "Clients"), h("div", {class: "card", id: "clients"}, clients(), turnedAway()));
  [...app.querySelectorAll(".scroll")].forEach((one, at) => { one.scrollLeft = scrolled[at] || 0; });
}
async function ask(path) {
  const answer = await fetch(path, {headers: token ? {Authorization: "Bearer " + token} : {}, cache: "no-store"});
  if (answer.status === 401) throw new Error("token wanted");
  if (!answer.ok) throw new Error("answered " + answer.status);
  return answer.json();
}
async function poll() {
  try {
    const last = samples.length ? samples[samples.length - 1].time_seconds : 0;
    const [now, newer] = await Promise.all([ask("/v1/stats"), ask("/v1/history?after=" + last)]);
    if (stats && stats.boot !== now.boot) samples.length = 0;  // another daemon: its counts begin anew
    samples.push(...(stats && stats.boot !== now.boot ? await ask("/v1/history") : newer));
    samples.splice(0, Math.max(0, samples.length - KEPT));
    stats = now;
    heardMs = Date.now();
    problem = "";
  } catch (error) {
    problem = error instanceof TypeError ? "no answer" : String(error.message).slice(0, 60);
  }
  render();
}
poll();
setInterval(() => { if (!document.hidden) poll(); }, POLL_MS);
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
