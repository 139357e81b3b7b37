"use strict";
// Asks for the state every few seconds and draws it. All text is set as text, never as markup.
const token = new URLSearchParams(location.search).get("token");
const SECONDS = 3;
const COLORS = ["#3b7dbd", "#d08c3a", "#4f9d69", "#a05fb0", "#b4433a", "#7a8794", "#2f9c9c", "#c2a83e"];
const FEW = 8; // points whose intervals are drawn one by one
const SVG = "http://www.w3.org/2000/svg";
const videos = new Map(); // number of a clip -> its address in this page
let shown = "";

const get = (path) => fetch(path, { headers: { Authorization: `Bearer ${token}` }, cache: "no-store" });

function element(name, options = {}, ...children) {
  const { text, ...attributes } = options;
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function shape(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

const number = (value) => (value === null ? "–" : Number(value.toPrecision(4)).toString());

// curves

function curve(data) {
  const width = 340, height = 190, left = 48, right = 8, top = 8, bottom = 24;
  const values = [...data.points, ...data.lows, ...data.highs].filter((value) => value !== null);
  let low = Math.min(...values), high = Math.max(...values);
  if (low === high) { low -= 1; high += 1; }
  const first = data.steps[0], last = Math.max(data.steps.at(-1), first + 1);
  const x = (step) => left + ((step - first) / (last - first)) * (width - left - right);
  const y = (value) => top + ((high - value) / (high - low)) * (height - top - bottom);

  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, class: "curve", role: "img", "aria-label": data.title });
  for (const value of [low, (low + high) / 2, high]) {
    svg.append(shape("line", { x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    svg.append(shape("text", { x: left - 5, y: y(value) + 3, "text-anchor": "end", "font-size": 10 }, number(value)));
  }
  svg.append(shape("text", { x: left, y: height - 8, "font-size": 10 }, number(first)));
  svg.append(shape("text", { x: width - right, y: height - 8, "text-anchor": "end", "font-size": 10 }, number(last)));

  const banded = data.steps.map((step, i) => [step, data.lows[i], data.highs[i]]).filter(([, a, b]) => a !== null && b !== null);
  if (banded.length > 1) {
    const upper = banded.map(([step, , b]) => `${x(step)},${y(b)}`);
    const lower = banded.map(([step, a]) => `${x(step)},${y(a)}`).reverse();
    svg.append(shape("polygon", { points: [...upper, ...lower].join(" "), class: "band" }));
  }
  if (banded.length <= FEW) {
    for (const [step, a, b] of banded) svg.append(shape("line", { x1: x(step), x2: x(step), y1: y(a), y2: y(b), class: "interval" }));
  }
  const mean = data.steps.map((step, i) => [step, data.means[i]]).filter(([, value]) => value !== null);
  svg.append(shape("polyline", { points: mean.map(([step, value]) => `${x(step)},${y(value)}`).join(" "), class: "mean" }));
  data.steps.forEach((step, i) => svg.append(shape("circle", { cx: x(step), cy: y(data.points[i]), r: 1.8 })));
  const caption = `now ${number(data.means.at(-1))}; band: 95 % interval of the mean`;
  return element("figure", {}, element("h3", { text: data.title }), svg, element("figcaption", { text: caption }));
}

// clips: loaded when they come into view, once each

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    seen.unobserve(entry.target);
    load(entry.target);
  }
}, { rootMargin: "200px" });

async function load(video) {
  const clip = video.dataset.clip;
  try {
    if (!videos.has(clip)) {
      const answer = await get(`/clips/${clip}`);
      if (!answer.ok) throw new Error("gone");
      videos.set(clip, URL.createObjectURL(await answer.blob()));
    }
    video.src = videos.get(clip);
  } catch {
    video.replaceWith(element("small", { text: "this clip is gone" }));
  }
}

function clipCell(clip) {
  const video = element("video", { "data-clip": clip.number, autoplay: "", loop: "", playsinline: "" });
  video.muted = true; // without it, browsers do not start by themselves
  seen.observe(video);
  const { total, ...others } = clip.values;
  const scores = Object.entries(others).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  const head = total === undefined ? clip.title : `${clip.title}: ${number(total)}`;
  return element("div", {}, video, element("b", { text: head }), element("br"), element("small", { text: scores }));
}

function pairs(rows, title) {
  return element("div", { class: "pairs" }, ...rows.map((row) => element(
    "figure", {}, element("h3", { text: title(row) }), element("div", { class: "pair" }, ...row.clips.map(clipCell)),
  )));
}

// a run

function phases(list) {
  const total = list.reduce((sum, phase) => sum + phase.seconds, 0);
  const bar = element("div", { class: "bar" });
  const legend = element("p");
  list.forEach((phase, i) => {
    const part = element("span", { title: phase.name });
    part.style.flex = `${phase.seconds} 0 0`;
    part.style.background = COLORS[i % COLORS.length];
    bar.append(part);
    const name = element("span", { class: "swatch", text: phase.name });
    name.style.setProperty("--c", COLORS[i % COLORS.length]);
    legend.append(name, ` ${number(phase.seconds)} s  `);
  });
  return element("figure", {}, element("h3", { text: `An iteration: ${number(total)} s` }), bar, legend);
}

function runSection(run) {
  const section = element("section", {}, element("h1", { text: run.name }));
  if (run.problem) section.append(element("p", { class: "problem", text: run.problem }));
  if (!run.curves) return section;
  section.append(element("p", { text: `${run.iterations} of ${run.planned} iterations. ${run.status}` }));
  section.append(element("p", {}, element("b", { text: run.verdict })));
  if (run.findings.length) {
    section.append(element("ol", { class: "findings" }, ...run.findings.map((finding) => element(
      "li", {}, element("b", { text: finding.name }), `: ${finding.evidence}. ${finding.cause} `, element("i", { text: finding.remedy }),
    ))));
  }
  for (const text of run.breaks) section.append(element("p", { text }));
  section.append(element("div", { class: "panels" }, ...run.curves.map(curve)));
  if (run.phases.length) section.append(phases(run.phases));
  if (run.rollouts.length) {
    section.append(element("h2", { text: "Best and worst of a group" }));
    section.append(element("p", { text: "Rollouts with exploration noise, newest first. Is the better one better to you?" }));
    section.append(pairs(run.rollouts, (row) => `iteration ${row.step}: ${row.prompt}`));
  }
  if (run.validation.rows.length) {
    section.append(element("h2", { text: "Newest validation beside the first" }));
    section.append(pairs(run.validation.rows, (row) => row.prompt));
  }
  return section;
}

// following

async function update() {
  const connection = document.getElementById("connection");
  try {
    const answer = await get("/state");
    if (!answer.ok) throw new Error(`answer ${answer.status}`);
    const text = await answer.text();
    if (text !== shown) {
      const state = JSON.parse(text);
      const place = window.scrollY;
      document.getElementById("runs").replaceChildren(...state.runs.map(runSection));
      window.scrollTo(0, place);
      document.title = state.runs.map((run) => `${run.name} ${run.iterations ?? ""}`).join(", ");
      forget(state);
      shown = text;
    }
    connection.className = "";
    connection.textContent = `Follows ${JSON.parse(text).runs.length} run(s); looked at ${new Date().toLocaleTimeString()}.`;
  } catch (error) {
    connection.className = "lost";
    connection.textContent = `No answer (${error.message}); trying again. Is the program, or the tunnel, still there?`;
  }
  setTimeout(update, 1000 * SECONDS);
}

function forget(state) { // clips that are no longer shown
  const used = new Set();
  for (const run of state.runs) {
    for (const row of [...(run.rollouts ?? []), ...(run.validation?.rows ?? [])]) row.clips.forEach((clip) => used.add(clip.number));
  }
  for (const [clip, address] of videos) {
    if (!used.has(clip)) {
      URL.revokeObjectURL(address);
      videos.delete(clip);
    }
  }
}

update();
