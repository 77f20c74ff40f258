"use strict";
// Fetches status.json every two seconds and writes it into the page. All text is set as text, never as markup.
const EVERY_MS = 2000;
const CURVES = [
  ["workers", "Workers", true], ["batch", "Samples per step", true], ["lr", "Learning rate", true],
  ["samples_per_s", "Samples per second", false], ["loss", "Training loss", false],
];
const SVG = "http://www.w3.org/2000/svg";

const at = (id) => document.getElementById(id);
const make = (name, text) => Object.assign(document.createElement(name), { textContent: text ?? "" });
function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  const rounded = Number(value.toPrecision(digits));
  if (rounded !== 0 && Math.abs(rounded) < 0.001) return rounded.toExponential();  // rates, for the most part
  return rounded.toLocaleString("en", { maximumSignificantDigits: digits });
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} d`;
}

function row(...cells) {
  const line = make("tr");
  cells.forEach((cell, column) => {
    const td = make("td", cell);
    if (column >= 2) td.className = "n";
    line.append(td);
  });
  return line;
}

function tile(value, name, detail) {
  const item = make("li");
  item.className = "tile";
  item.append(make("b", value), make("span", name), make("small", detail));
  return item;
}

function chart(title, times, values, steps) {
  const card = make("div"), W = 460, H = 190, left = 58, bottom = 24, top = 10;
  card.className = "card";
  card.append(make("h4", title));
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
  svg.setAttribute("class", "chart");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", title);
  const known = values.filter((value) => value !== null);
  const add = (name, attributes, text) => {
    const element = document.createElementNS(SVG, name);
    Object.entries(attributes).forEach(([key, value]) => element.setAttribute(key, value));
    if (text !== undefined) element.textContent = text;
    svg.append(element);
  };
  if (!known.length) {
    card.append(make("p", "nothing yet"));
    return card;
  }
  const low = Math.min(0, ...known), high = Math.max(...known) || 1, end = times[times.length - 1] || 1;
  const x = (time) => left + (W - left - 8) * (time / end);
  const y = (value) => H - bottom - (H - bottom - top) * ((value - low) / (high - low || 1));
  [low, (low + high) / 2, high].forEach((value) => {
    add("line", { class: "grid", x1: left, x2: W - 8, y1: y(value), y2: y(value) });
    add("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, number(value, 3));
  });
  [0, end / 2, end].forEach((time, place) =>
    add("text", { x: x(time), y: H - 6, "text-anchor": ["start", "middle", "end"][place] }, duration(time)));
  let path = "", before = null;
  values.forEach((value, index) => {
    if (value === null) { before = null; return; }
    const here = `${x(times[index]).toFixed(1)} `;
    path += before === null ? `M${here}${y(value).toFixed(1)}`
      : steps ? `H${here}V${y(value).toFixed(1)}` : `L${here}${y(value).toFixed(1)}`;
    before = value;
  });
  add("path", { class: "curve", d: path });
  card.append(svg);
  return card;
}

function show(view) {
  const { now, job, progress, series } = view;
  const alive = now.members.filter((member) => member.heard_s !== null).length;
  at("job").textContent = [job.workload, job.rule && `rule ${job.rule}`, job.policy && `policy ${job.policy}`,
    `lighthouse ${now.lighthouse}`, now.quorum ? `quorum ${now.quorum}` : "no quorum"].filter(Boolean).join(" · ");
  const share = progress.total_samples ? (progress.samples + progress.dropped) / progress.total_samples : 0;
  at("bar").style.width = `${Math.min(100, 100 * share).toFixed(1)}%`;
  const dollars = (value) => (value === null ? "–" : `$${value.toFixed(2)}`);
  const tiles = [
    tile(String(alive), "replicas alive", `step ${now.step ?? "–"}, epoch ${now.epoch ?? "–"}`),
    tile(number(now.batch), "samples per step", `rate ${number(now.lr)} (x${number(now.multiplier, 3)})`),
    tile(number(now.samples_per_s ?? progress.samples_per_s, 3), "samples per second", `loss ${number(now.loss)}`),
    tile(`${(100 * share).toFixed(1)} %`, "of all samples", `${number(progress.samples, 12)} of ${number(progress.total_samples, 12)}`
      + (progress.dropped ? `, ${number(progress.dropped, 12)} dropped` : "")),
    tile(duration(progress.left_s), "to the end, at this speed", `${duration(progress.seconds)} so far`),
  ];
  if (progress.usd !== null)
    tiles.push(tile(dollars(progress.usd), "so far", `${dollars(progress.usd_left)} to the end, at this fleet`));
  if (now.worth)
    tiles.push(tile(`+${(100 * now.worth.gain).toFixed(1)} %`, "by one more worker, at most",
      `efficiency ${(100 * now.worth.now.efficiency).toFixed(0)} %`));
  at("tiles").replaceChildren(...tiles);
  at("members").replaceChildren(...now.members.map((member) => row(member.name, member.state, member.step ?? "–",
    member.heard_s === null ? "–" : `${member.heard_s.toFixed(1)} s ago`, number(member.samples_per_s, 3))));
  at("charts").replaceChildren(...CURVES.map(([name, title, steps]) => chart(title, series.time_s, series[name], steps)));
  at("validations").replaceChildren(...view.validations.slice(-8).reverse().map((one) =>
    row(`epoch ${one.epoch}`, Object.entries(one.metrics).map(([name, value]) => `${name} ${number(value)}`).join(", "))));
  at("events").replaceChildren(...view.events.map((event) => {
    const line = make("tr");
    line.append(make("td", String(event.step)), make("td", event.replica), make("td", event.what));
    line.append(Object.assign(make("td", event.text), { className: "notes" }));
    return line;
  }));
  document.querySelectorAll(".wide").forEach((box) => box.classList.toggle("fits", box.scrollWidth <= box.clientWidth));
}

async function refresh() {
  try {
    const answer = await fetch("status.json", { cache: "no-store" });
    const view = await answer.json();
    if (!answer.ok) throw new Error(view.error);
    show(view);
    at("stale").textContent = view.note && `From the files of the job: ${view.note}.`;
  } catch (error) {
    at("stale").textContent = `Not up to date: ${error.message}.`;
  }
  setTimeout(refresh, EVERY_MS);
}
refresh();
