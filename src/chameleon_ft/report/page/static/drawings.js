// Drawings on canvases: workers and layers, and the schedule of a step.
import { duration, element, fill } from "/static/words.js";

const KINDS = {
  F: ["forward", "#a6cee8", "#10202c"],
  B: ["backward", "#a8430f", "#ffffff"],
  I: ["backward, input gradient", "#a8430f", "#ffffff"],
  W: ["backward, weight gradient", "#3fb598", "#06231c"],
};
const REDUCTION = ["gradient all-reduce", "#7a4fb0"];
const IDLE = ["idle", "#fff1c9"];

const colours = () => {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(name).trim();
};

function prepared(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.textBaseline = "middle";
  return context;
}

function layersIn(text) { // "0-3, 7"
  return text.split(",").filter(Boolean).map((part) => part.trim().split("-").map(Number)).map(([first, last]) => [first, (last ?? first) + 1]);
}

// Rows are workers, columns are layers; one column stands for several layers if there are many.
export function drawGrid(canvas, grid, tell) {
  const rows = grid.workers, layers = Math.max(1, grid.num_layers), label = 92;
  const room = Math.max(240, canvas.parentElement.clientWidth - 4);
  const height = rows.length > 200 ? 5 : rows.length > 64 ? 9 : 17, gap = rows.length > 64 ? 1 : 3;
  const width = Math.max(2, Math.min(46, (room - label) / layers));
  const context = prepared(canvas, Math.max(room, label + width * layers), rows.length * (height + gap) + 22);
  const colour = colours();
  context.font = "11px system-ui, sans-serif";
  rows.forEach((row, index) => {
    const y = index * (height + gap), ink = colour(`--${row.state}`);
    if (height > 10 || index % 16 === 0) {
      context.fillStyle = colour("--ink");
      context.fillText(`worker ${row.worker}`, 12, y + height / 2);
    }
    context.fillStyle = ink;
    context.fillRect(0, y, 7, height);
    context.fillStyle = colour("--line");
    context.fillRect(label, y + height / 2, width * layers, 1);
    context.fillStyle = ink;
    for (const [start, stop] of row.layers)
      for (let layer = start; layer < stop; layer += 1) context.fillRect(label + layer * width, y, Math.max(1, width - (width > 6 ? 2 : 0)), height);
    context.strokeStyle = context.fillStyle = colour("--arriving");
    for (const [start, stop] of layersIn(row.arriving)) {
      context.lineWidth = 2;
      context.strokeRect(label + start * width + 1, y + 1, (stop - start) * width - 4, height - 2);
    }
  });
  context.fillStyle = colour("--pale");
  const every = Math.ceil(28 / width);
  for (let layer = 0; layer < grid.num_layers; layer += every)
    context.fillText(String(layer), label + layer * width, rows.length * (height + gap) + 10);
  canvas.onpointermove = (event) => {
    const row = rows[Math.floor(event.offsetY / (height + gap))];
    if (!row) return;
    const held = row.layers.map(([start, stop]) => (stop - start > 1 ? `${start}-${stop - 1}` : start)).join(", ");
    tell(`worker ${row.worker} on ${row.host || "an unknown host"}: ${row.state}; layers ${held || "none"}${row.arriving ? `, and ${row.arriving} on the way` : ""}`);
  };
  canvas.onclick = canvas.onpointermove;
}

// Of each worker two lanes: predicted above measured.
export function drawSchedule(canvas, legend, found) {
  const label = 70, lane = 16, group = 2 * lane + 8, tail = 24;
  const longest = Math.max(...found.lanes.map((each) => each.step_s));
  const boxes = Math.max(...found.lanes.flatMap((each) => Object.values(each.operations).map((own) => own.length)), 1);
  const room = Math.max(canvas.parentElement.clientWidth - 4, Math.min(label + boxes * 14, 2400));
  const scale = (room - label - 6) / longest;
  const context = prepared(canvas, room, found.workers.length * group + tail);
  const colour = colours();
  context.font = "10px system-ui, sans-serif";
  found.workers.forEach((worker, index) => {
    const top = index * group;
    context.fillStyle = colour("--ink");
    context.textAlign = "left";
    context.fillText(`worker ${worker}`, 0, top + lane);
    found.lanes.forEach((each, which) => {
      const y = top + which * (lane + 1);
      context.fillStyle = IDLE[1];
      context.fillRect(label, y, each.step_s * scale, lane);
      for (const [kind, batch, start, end] of each.operations[worker] ?? []) {
        const [, fillColour, ink] = KINDS[kind] ?? KINDS.F, width = (end - start) * scale;
        context.fillStyle = fillColour;
        context.fillRect(label + start * scale, y, Math.max(0.5, width - 0.6), lane - 4);
        if (width > 12) {
          context.fillStyle = ink;
          context.textAlign = "center";
          context.fillText(String(batch), label + (start + (end - start) / 2) * scale, y + lane / 2 - 2);
        }
      }
      context.fillStyle = REDUCTION[1];
      for (const [owner, start, end] of each.reductions)
        if (owner === worker) context.fillRect(label + start * scale, y + lane - 4, Math.max(1, (end - start) * scale), 4);
    });
  });
  context.fillStyle = colour("--pale");
  context.textAlign = "center";
  for (let part = 0; part <= 4; part += 1)
    context.fillText(duration((longest * part) / 4), Math.min(room - 22, label + 12 + ((longest * part) / 4) * scale), found.workers.length * group + 10);
  const drawn = new Set(found.lanes.flatMap((each) => Object.values(each.operations).flat().map(([kind]) => kind)));
  const entries = [...Object.entries(KINDS).filter(([kind]) => drawn.has(kind)).map(([, kind]) => kind), REDUCTION, IDLE];
  fill(legend, entries.map(([name, ink]) => element("span", {}, element("i", { style: `background:${ink}` }), name)));
}
