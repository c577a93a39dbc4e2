// Incidents and decisions: lost workers, candidates, predictions and outcomes.
import { bytes, clock, count, duration, element, fill } from "/static/words.js";

const PHASES = [["detect_s", "detect", "#c2321f"], ["stop_s", "stop", "#d98a00"], ["decide_s", "decide", "#3b82c4"],
  ["transfer_s", "transfer", "#8a63d2"], ["regroup_s", "regroup", "#2f9e77"], ["repeated_s", "repeat", "#9fb3ad"]];
const TRIGGERS = { loss: "Loss", join: "New workers", review: "Review of a provisional plan", drain: "Workers that leave", slow: "Slow workers" };

export function showIncidents(parent, all, error) {
  if (error) return fill(parent, [element("p", { class: "tone-bad" }, error)]);
  if (!all.length) return fill(parent, [element("p", { class: "small" }, "None yet.")]);
  const open = new Set([...parent.querySelectorAll("details[open]")].map((each) => each.dataset.key));
  const isFirst = !parent.querySelector("details");
  fill(parent, all.map((incident, index) => {
    const shown = showIncident(incident);
    shown.open = open.has(shown.dataset.key) || (isFirst && index === 0);
    return shown;
  }));
  return undefined;
}

function showIncident({ time, diagnosis, decision, told }) {
  const lost = diagnosis ? diagnosis.culprits.map((each) => each.worker).join(", ") : "";
  const title = diagnosis
    ? `worker ${lost} lost in step ${count(diagnosis.step)}: ${diagnosis.culprits[0].cause}; ${diagnosis.policy}, stall ${duration(diagnosis.stall_s)}`
    : `${TRIGGERS[decision.trigger] ?? decision.trigger}, step ${count(decision.step)}: ${decision.chosen ?? "no plan"}`;
  const cost = diagnosis && diagnosis.cost_steps != null ? `, cost ${diagnosis.cost_steps.toFixed(2)} steps` : "";
  const parts = [
    element("summary", { class: diagnosis ? "tone-bad" : "" }, element("span", { class: "small" }, `${clock(time)} `), title + cost),
    ...(diagnosis ? showDiagnosis(diagnosis) : []),
    ...told.flatMap(showTold),
    ...(decision ? showDecision(decision) : []),
  ];
  const made = element("details", { class: "incident" }, ...parts);
  made.dataset.key = `${time}`;
  return made;
}

function showDiagnosis(diagnosis) {
  const rows = diagnosis.culprits.map((each) => [
    `worker ${each.worker}`, each.host || "–", each.cause,
    each.detected_after_s == null ? "–" : duration(each.detected_after_s),
    [each.doing, each.place, each.process, each.evidence].filter(Boolean).join("; ") || "–",
  ]);
  const failed = diagnosis.failed_messages.map(([from, to, error]) => element("div", { class: "small" }, `message of worker ${from}${to == null ? "" : ` with ${to}`} failed: ${error}`));
  return [table(["lost", "host", "cause", "detected after", "evidence"], rows), ...failed];
}

function showTold(told) {
  const facts = told.facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]);
  return [element("div", {}, told.title), element("dl", { class: "facts small" }, ...facts)];
}

function timeline(losses) {
  const longest = losses.reduce((best, each) => (each.stall_s > (best?.stall_s ?? -1) ? each : best), null);
  if (!longest) return [];
  const parts = PHASES.map(([field, name, colour]) => [name, longest[field] ?? 0, colour]).filter(([, seconds]) => seconds > 0);
  const total = parts.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
  const bar = element("div", { class: "bar", role: "img", "aria-label": "phases of the stall" },
    ...parts.map(([name, seconds, colour]) => element("div", { style: `width:${(100 * seconds) / total}%;background:${colour}`, title: `${name} ${duration(seconds)}` })));
  const legend = element("p", { class: "legend" }, ...parts.map(([name, seconds, colour]) =>
    element("span", {}, element("i", { style: `background:${colour}` }), `${name} ${duration(seconds)}`)));
  return [bar, legend];
}

function showDecision(decision) {
  const rows = decision.candidates.map((each) => ({
    cells: [each.policy, duration(each.step_s), duration(each.stall_s), bytes(each.bytes), each.samples == null ? "–" : count(Math.round(each.samples)),
      each.policy === decision.chosen ? "chosen" : each.feasible ? "" : each.reason ?? "not feasible"],
    chosen: each.policy === decision.chosen,
  }));
  const how = decision.prepared ? "prepared beforehand" : `made in ${duration(decision.search_s)}`;
  const facts = element("p", { class: "small" },
    `Decision ${decision.number}, ${how}, with ${decision.live} live workers under ${decision.plan}; ` +
    `the next failure is expected in ${duration(decision.horizon_s)}, by ${decision.rate.failures} failures so far.`);
  const outcome = decision.outcome;
  const came = outcome
    ? table(["", "predicted", "actual", "error"], [
      ["step", duration(outcome.predicted_step_s), duration(outcome.measured_step_s), percent(outcome.step_error)],
      ["stall", duration(outcome.predicted_stall_s), duration(outcome.measured_stall_s), percent(outcome.stall_error)],
      ...(decision.cost ? [["cost, steps", decision.cost.predicted_steps?.toFixed(2) ?? "–", decision.cost.failure_cost_steps.toFixed(2), ""]] : []),
    ], [1, 2, 3])
    : element("p", { class: "small" }, "No outcome is measured yet.");
  const warning = outcome?.warning ? [element("p", { class: "tone-warning" }, outcome.warning)] : [];
  return [...timeline(decision.losses), facts,
    table(["candidate", "step", "stall", "moves", "samples until then", ""], rows.map((row) => row.cells), [1, 2, 3, 4], rows.map((row) => row.chosen)),
    came, ...warning];
}

const percent = (share) => (share == null ? "–" : `${share >= 0 ? "+" : ""}${(100 * share).toFixed(1)}%`);

function table(heads, rows, numbers = [], chosen = []) {
  const cell = (kind) => (text, index) => element(kind, numbers.includes(index) ? { class: "number" } : {}, text);
  const body = rows.map((row, index) => element("tr", chosen[index] ? { class: "chosen" } : {}, ...row.map(cell("td"))));
  return element("div", { class: "scroll" }, element("table", {}, element("tr", {}, ...heads.map(cell("th"))), ...body));
}
