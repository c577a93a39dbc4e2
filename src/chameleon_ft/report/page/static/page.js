// The page of a run. It gets the whole state once, and then what is new by server-sent events.
import { drawGrid, drawSchedule } from "/static/drawings.js";
import { showIncidents } from "/static/incidents.js";
import { clock, count, duration, element, fill } from "/static/words.js";

const $ = (id) => document.getElementById(id);
const MAX_POINTS = 1200;
const MAX_NEWS = 400;
const HELD_OUT = "evaluation:"; // begins the name of a column of evaluations
const OVER = ["finished", "interrupted", "terminated", "failed"];
const WORKER_STATES = ["live", "slow", "draining", "spare", "joining", "lost", "left"];

let report = null;
let grid = { num_layers: 0, workers: [] };
let series = {};
let evaluations = { step: [], loss: [] };
let whatIf = [];
let charts = [];
let cursor = { steps: 0, events: 0 };

// --- the overview ---------------------------------------------------------------------------------------------------

function showReport(next) {
  report = next;
  const last = report.last;
  const name = report.run.split("/").filter(Boolean).pop() ?? "run";
  $("name").textContent = name;
  document.title = `${report.condition}: ${name}`;
  $("condition").textContent = report.condition;
  $("condition").dataset.condition = report.condition;
  $("rate").textContent = `Throughput, ${report.unit}/s`;
  $("reason").textContent = report.reason;
  $("run").textContent = report.run;
  const done = last ? last.step + 1 : 0;
  $("progress").style.width = `${(100 * done) / report.steps}%`;
  $("steps").textContent = `${count(done)} of ${count(report.steps)} steps` +
    (report.eta_s == null ? "" : `, ends in ${duration(report.eta_s)}`);
  const change = report.pace && report.earlier ? report.pace.step_s / report.earlier.step_s - 1 : null;
  const against = change == null ? "" : `${change >= 0 ? "+" : ""}${(100 * change).toFixed(1)}% against ${report.earlier.since === "before" ? "earlier steps" : report.earlier.since}`;
  const ratio = (saved) => (saved ? `step ${count(saved.step)}` : "none yet");
  const tiles = [
    ["loss", last && last.loss != null ? last.loss.toFixed(4) : "–", last ? `step ${count(last.step)}` : ""],
    ["step time", report.pace ? duration(report.pace.step_s) : "–", against],
    [`${report.unit}/s`, report.pace ? count(Math.round(report.pace.tokens_per_s)) : "–", `${count(report.tokens)} ${report.unit} in all`],
    ["last step", report.last_step_age_s == null ? "–" : duration(report.last_step_age_s), "ago"],
    ["goodput", report.goodput == null ? "–" : `${(100 * report.goodput).toFixed(1)}%`, "of the time trains steps that count"],
    ["workers", Object.entries(report.counts).map(([state, n]) => `${n} ${state}`).join(", ") || "–", `plan ${report.generation}, ${report.policy}`],
    ["failures", count(report.costs.failures), `${count(report.costs.incidents)} incidents, ${report.costs.steps.toFixed(1)} steps lost`],
    ["next failure", report.next_failure_s == null ? "–" : duration(report.next_failure_s), "expected, as learned"],
    ["checkpoint", report.checkpoint ? duration(report.checkpoint.age_s) : "–", `old; ${ratio(report.checkpoint)}`],
    ["snapshot", report.snapshot ? duration(report.snapshot.age_s) : "–", `old; ${ratio(report.snapshot)}`],
  ];
  fill($("tiles"), tiles.map(([title, value, note]) =>
    element("div", { class: "tile" }, element("span", {}, title), element("b", {}, value), element("span", {}, note))));
  fill($("facts"), report.facts.flatMap(([title, value]) => [element("dt", {}, title), element("dd", {}, value)]));
  showSpecial();
  showWhatIf(whatIf);
  const over = OVER.includes(report.condition);
  for (const button of document.querySelectorAll("button[data-action]")) button.disabled = over;
}

const COLOURS = ["--accent", "--joining", "--slow", "--arriving", "--lost"];
const metrics = () => Object.keys(evaluations).filter((name) => name !== "step" && name !== "loss");

function makeCharts() {
  const ink = getComputedStyle(document.documentElement);
  const colour = (name) => ink.getPropertyValue(name).trim();
  const axis = { stroke: colour("--pale"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
  const chart = (id, columns) => {
    const target = $(id);
    target.replaceChildren();
    const lines = columns.map(([column, label, name, width]) => ({
      label, stroke: colour(name), width, points: { show: column.startsWith(HELD_OUT), size: 5, fill: colour(name) }, column,
    }));
    const plot = new uPlot({
      width: target.clientWidth || 320, height: 190, scales: { x: { time: false } }, cursor: { sync: { key: "steps" } },
      axes: [axis, { ...axis, size: 62 }], series: [{ label: "step" }, ...lines],
    }, [[], ...columns.map(() => [])], target);
    return { plot, target, columns };
  };
  charts = [
    chart("chart-loss", [["loss", "loss", "--accent", 1.6], [`${HELD_OUT}loss`, "held out", "--slow", 1]]),
    chart("chart-rate", [["tokens_per_s", "a second", "--joining", 1.6]]),
    chart("chart-step", [["longest_s", "longest", "--slow", 0.7], ["step_s", "mean", "--accent", 1.6]]),
  ];
  $("evaluation").hidden = !metrics().length;
  if (metrics().length)
    charts.push(chart("chart-evaluation", metrics().map((name, index) => [HELD_OUT + name, name, COLOURS[index % COLOURS.length], 1])));
  drawCharts();
}

function showEvaluations(next) {
  const before = metrics().join();
  evaluations = next;
  if (metrics().join() === before) drawCharts();
  else makeCharts();
}

function drawCharts() {
  // Steps that were trained again after a return to a checkpoint replace those before.
  const rows = new Map();
  (series.step ?? []).forEach((step, index) => rows.set(step, index));
  const evaluated = new Map(evaluations.step.map((step, index) => [step, index]));
  // Of the newest steps, points may be left out. Where there is no point, nothing is a gap.
  const steps = [...new Set([...rows.keys(), ...evaluated.keys()])].sort((a, b) => a - b);
  const values = (column) => steps.map((step) => {
    if (column.startsWith(HELD_OUT)) return evaluations[column.slice(HELD_OUT.length)][evaluated.get(step)];
    const value = series[column]?.[rows.get(step)];
    return column.endsWith("_s") && column !== "tokens_per_s" && value != null ? 1000 * value : value;
  });
  for (const { plot, columns } of charts) plot.setData([steps, ...columns.map(([column]) => values(column))]);
}

function addSteps(more) {
  for (const column of Object.keys(more)) series[column] = [...(series[column] ?? []), ...more[column]];
  const length = series.step?.length ?? 0;
  if (length > MAX_POINTS) // every second one of the older half
    for (const column of Object.keys(series))
      series[column] = series[column].filter((_, index) => index > length / 2 || index % 2 === 0);
  drawCharts();
}

// --- workers --------------------------------------------------------------------------------------------------------

function showGrid(next) {
  grid = next;
  drawGrid($("grid"), grid, (text) => { $("cell").textContent = text; });
  const states = WORKER_STATES.filter((state) => grid.workers.some((row) => row.state === state));
  const entries = states.map((state) => [state, `var(--${state})`]);
  if (grid.workers.some((row) => row.arriving)) entries.push(["migrating: layers arrive", "var(--arriving)"]);
  fill($("legend"), entries.map(([text, colour]) => element("span", {}, element("i", { style: `background:${colour}` }), text)));
  const live = grid.workers.filter((row) => ["live", "slow", "spare", "draining"].includes(row.state));
  const hosts = [...new Set(live.map((row) => row.host).filter(Boolean))];
  keepChoice($("drain-what"), [...hosts.map((host) => [`host:${host}`, `host ${host}`]), ...live.map((row) => [`worker:${row.worker}`, `worker ${row.worker}`])]);
  keepChoice($("inject-worker"), live.map((row) => [String(row.worker), `worker ${row.worker}`]));
  showSpecial();
}

function keepChoice(select, choices) {
  const before = select.value;
  fill(select, choices.map(([value, text]) => element("option", { value }, text)));
  if (choices.some(([value]) => value === before)) select.value = before;
}

function showSpecial() {
  const hostOf = new Map(grid.workers.map((row) => [row.worker, row.host]));
  const lines = [];
  for (const [worker, speed] of Object.entries(report?.speeds ?? {}))
    lines.push(`Slow: worker ${worker} at ${speed.toFixed(2)} of the speed of the others, on ${hostOf.get(Number(worker)) || "an unknown host"}`);
  for (const [link, speed] of Object.entries(report?.link_speeds ?? {}))
    lines.push(`Slow link: workers ${link} at ${speed.toFixed(2)} of the speed of other links`);
  const names = { lost: "Lost", joining: "Joining", draining: "Leaving", spare: "Spare", left: "Has left" };
  for (const [state, name] of Object.entries(names))
    if (report?.workers[state]) lines.push(`${name}: workers ${report.workers[state]}`);
  const moving = grid.workers.filter((row) => row.arriving);
  for (const row of moving) lines.push(`Migrating: layers ${row.arriving} to worker ${row.worker}, during training`);
  fill($("special"), lines.map((line) => element("div", {}, line)));
}

function showWhatIf(rows) {
  whatIf = rows;
  // Snapshots are in the memory of other workers, checkpoints on a disk.
  const newest = (...saved) => saved.filter(Boolean).sort((a, b) => b.step - a.step)[0];
  const head = element("tr", {}, ...["host", "workers", "what would be lost", "then"].map((text) => element("th", {}, text)));
  fill($("what-if"), [head, ...rows.map((row) => {
    const all = rows.length === 1;
    const back = all ? report?.checkpoint : newest(report?.checkpoint, report?.snapshot);
    const lost = all ? "all workers" : row.layers ? `every copy of layers ${row.layers}` : "no layer: other workers hold copies";
    const then = all || row.layers
      ? (back ? `training goes back to step ${count(back.step)}` : "training begins anew: there is no checkpoint yet")
      : "the step is completed, and training continues without these workers";
    return element("tr", {}, ...[row.host, row.workers, lost, then].map((text) => element("td", {}, text)));
  })]);
}

// --- events, incidents, schedule ------------------------------------------------------------------------------------

function newsItem(told) {
  const facts = told.facts.length
    ? element("dl", { class: "facts small" }, ...told.facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]))
    : null;
  return element("li", {}, element("span", { class: "small" }, `${clock(told.time)} `),
    element("span", { class: `tone-${told.tone}` }, told.title), ...(facts ? [facts] : []));
}

function addNews(all) {
  $("news").prepend(...all.map(newsItem).reverse());
  while ($("news").children.length > MAX_NEWS) $("news").lastChild.remove();
}

async function loadIncidents() {
  const answer = await fetch("/api/incidents").catch(() => null);
  if (!answer) return; // the stream ends, too, and all is loaded anew when the page is there again
  const found = await answer.json();
  showIncidents($("incident-list"), answer.ok ? found : [], answer.ok ? "" : found.error);
}

async function loadSchedule() {
  const answer = await fetch("/api/schedule").catch(() => null);
  if (!answer) return;
  const found = await answer.json();
  if (!answer.ok || !found) {
    $("schedule-facts").textContent = found?.error ?? "No whole step has been recorded yet; a run records some if timelines.every is above 0.";
    return;
  }
  const error = found.predicted_s / found.measured_s - 1;
  $("schedule-facts").textContent = `Step ${count(found.step)} in generation ${found.generation}: measured ${duration(found.measured_s)}, ` +
    `predicted ${duration(found.predicted_s)} (${error >= 0 ? "+" : ""}${(100 * error).toFixed(1)}%), from costs that are ${found.costs_from}. ` +
    "Of each worker the upper lane is predicted, the lower one measured." +
    (found.left_out ? ` ${found.left_out} more workers are not drawn.` : "") +
    (found.damaged.length ? ` What cannot be read is left out, such as ${found.damaged[0]}.` : "");
  drawSchedule($("schedule-canvas"), $("schedule-legend"), found);
}

// --- actions --------------------------------------------------------------------------------------------------------

function takeToken() {
  const found = new URLSearchParams(location.hash.slice(1)).get("token");
  if (found) {
    sessionStorage.setItem("token", found);
    history.replaceState(null, "", location.pathname);
  }
  $("token").value = sessionStorage.getItem("token") ?? "";
}

async function act(action) {
  const values = {};
  if (action === "drain") {
    const [what, ...rest] = $("drain-what").value.split(":");
    if (what === "host") values.host = rest.join(":");
    else values.workers = [Number(rest[0])];
  } else if (action === "inject") {
    values.worker = Number($("inject-worker").value);
    values.kind = $("inject-kind").value;
    if (values.kind.startsWith("slow")) values.factor = 0.5;
  }
  if (["finish", "inject", "drain"].includes(action) && !confirm(`${action} ${JSON.stringify(values)}: really?`)) return;
  sessionStorage.setItem("token", $("token").value);
  $("answer").textContent = "asked …";
  try {
    const answer = await fetch(`/api/actions/${action}`, {
      method: "POST", body: JSON.stringify(values),
      headers: { Authorization: `Bearer ${$("token").value}`, "Content-Type": "application/json" },
    });
    const found = await answer.json();
    $("answer").textContent = found.done ?? `not done: ${found.error}`;
    $("answer").className = answer.ok ? "tone-good" : "tone-bad";
  } catch (error) {
    $("answer").textContent = `not done: ${error.message}`;
  }
}

// --- the stream -----------------------------------------------------------------------------------------------------

function connected(text, isBad) {
  $("connection").textContent = text;
  $("connection").className = isBad ? "bad" : "";
}

function follow() {
  const stream = new EventSource(`/api/events?steps=${cursor.steps}&events=${cursor.events}`);
  const on = (name, handler) => stream.addEventListener(name, (event) => handler(JSON.parse(event.data)));
  stream.onopen = () => connected(report && OVER.includes(report.condition) ? "" : "live", false);
  stream.onerror = () => {
    stream.close(); // an EventSource that reconnects by itself would ask for the same points again
    const over = report && OVER.includes(report.condition);
    connected(over ? "the run is over; `chameleon page RUN` shows it again" : "not connected; trying again", !over);
    setTimeout(open, over ? 30000 : 3000);
  };
  on("report", showReport);
  on("steps", addSteps);
  on("grid", showGrid);
  on("what_if", showWhatIf);
  on("evaluations", showEvaluations);
  on("news", ({ told }) => { addNews(told); loadIncidents(); });
}

async function open() {
  try {
    const whole = await (await fetch("/api/state")).json();
    showReport(whole.report);
    showGrid(whole.grid);
    showWhatIf(whole.what_if);
    series = whole.series;
    evaluations = whole.evaluations;
    cursor = whole.next;
    makeCharts();
    $("news").replaceChildren();
    addNews(whole.news);
    loadIncidents();
    follow();
  } catch (error) {
    connected("not connected; trying again", true);
    setTimeout(open, 3000);
  }
}

new ResizeObserver(() => {
  for (const { plot, target } of charts) plot.setSize({ width: target.clientWidth, height: 190 });
  drawGrid($("grid"), grid, (text) => { $("cell").textContent = text; });
}).observe($("overview"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { makeCharts(); showGrid(grid); });
for (const button of document.querySelectorAll("button[data-action]")) button.addEventListener("click", () => act(button.dataset.action));
$("token-form").addEventListener("submit", (event) => event.preventDefault());
$("schedule-load").addEventListener("click", loadSchedule);
takeToken();
open();
