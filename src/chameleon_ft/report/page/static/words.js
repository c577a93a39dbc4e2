// Numbers and times in words, and elements of the page. Texts are never parsed as HTML.
export function duration(seconds) {
  if (seconds == null || !Number.isFinite(seconds)) return "–";
  if (seconds >= 172800) return `${(seconds / 86400).toFixed(1)} days`;
  if (seconds >= 7200) return `${(seconds / 3600).toFixed(1)} h`;
  if (seconds >= 600) return `${(seconds / 60).toFixed(1)} min`;
  if (seconds >= 1) return `${seconds.toFixed(seconds < 10 ? 2 : seconds < 100 ? 1 : 0)} s`;
  if (seconds >= 0.001) return `${(seconds * 1e3).toPrecision(3)} ms`;
  return seconds > 0 ? `${(seconds * 1e6).toPrecision(3)} µs` : "0 s";
}

export const count = (number) => number.toLocaleString("en");

export function bytes(number) {
  if (number == null) return "–";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (Math.abs(number) >= 1000 && unit < units.length - 1) { number /= 1000; unit += 1; }
  return `${number.toFixed(unit ? 1 : 0)} ${units[unit]}`;
}

export const clock = (time) => new Date(1000 * time).toLocaleString([], { hour12: false });

export function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export const fill = (parent, children) => parent.replaceChildren(...children);
