// Everything that comes from models or data is set as text (textContent, append of strings), never as HTML.

const $ = (id) => document.getElementById(id);

function el(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children.filter((child) => child !== null));
  return node;
}

async function inflate(id) {
  const { body } = await fetch(`data:application/gzip;base64,${$(id).textContent}`);
  $(id).remove();
  return new Response(body.pipeThrough(new DecompressionStream("gzip"))).text();
}

const number = (value, digits = 3) => (value === null ? "–" : String(+value.toFixed(digits)).replace("-", "−"));
const percent = (part, whole) => (whole ? `${number((100 * part) / whole, 1)} %` : "–");
const words = (name) => name.replaceAll("_", " ");
const count = (value) => value.toLocaleString("en");

// --- Curves ---------------------------------------------------------------------------------------------------------

const PALETTE = 8;
const plots = new Map(); // a panel's div -> its data and whether it is drawn
const probe = document.body.appendChild(el("i", { hidden: true }));
const nearView = new IntersectionObserver(
  (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => draw(entry.target)),
  { rootMargin: "400px" },
);

function color(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

function showSections(parent, sections) {
  const range = stepRange(sections);
  for (const { heading, panels, zero } of sections) {
    const figures = panels.map((panel) => {
      const div = el("div", { className: "plot" });
      plots.set(div, { panel, range, drawn: false });
      nearView.observe(div);
      return el("figure", { className: "panel" },
        el("figcaption", {}, el("b", {}, panel.title), el("span", {}, panel.unit)), div);
    });
    const grid = el("div", { className: "panels" }, ...figures);
    grid.style.setProperty("--columns", figures.length % 3 ? 2 : 3);
    parent.append(el("h2", {}, heading), grid,
      zero.length ? el("p", { className: "quiet" }, `Always 0: ${zero.join(", ")}.`) : "");
  }
}

function stepRange(sections) {
  const curves = sections.flatMap((section) => section.panels).flatMap((panel) => panel.curves);
  const steps = curves.filter((curve) => curve.kind !== "paper").flatMap((curve) => curve.x);
  const [first, last] = steps.reduce(([low, high], step) => [Math.min(low, step), Math.max(high, step)], [0, 1]);
  return [first - (last - first) * 0.02, last + (last - first) * 0.02];
}

function paperTrace(base, line, panel, curve) {
  const place = panel.curves.filter(({ kind, color }) => kind === "paper" && color === curve.color).indexOf(curve);
  return { ...base, visible: $("paper").checked, opacity: 0.75, hoverinfo: "skip",
    line: { ...line, width: 1.5, dash: ["dash", "longdashdot"][place % 2] } };
}

function traces(curve, panel) {
  const line = { color: color(curve.color === null ? "quiet" : `c${curve.color % PALETTE}`), width: 2 };
  const base = { name: curve.name, x: curve.x, y: curve.y, mode: "lines", line, legendgroup: curve.kind + curve.name };
  if (curve.kind === "paper") return [paperTrace(base, line, panel, curve)];
  const shared = panel.curves.some((other) => other.kind === "train" && other.name === curve.name);
  base.legendgroup = curve.name;
  if (curve.kind === "eval") {
    const name = shared ? `${curve.name}, held out` : curve.name;
    return [{ ...base, name, showlegend: !shared, mode: "lines+markers", line: { ...line, width: 1.5, dash: "dot" },
      marker: { size: 6 } }];
  }
  if (curve.x.length === 1) return [{ ...base, mode: "markers", marker: { size: 7 } }];
  if (!curve.mean) return [base];
  const pale = { ...base, showlegend: false, hoverinfo: "skip", opacity: 0.28, line: { ...line, width: 1 } };
  return [pale, { ...base, y: curve.mean }];
}

function valueRange(panel) {
  if (panel.share) return { range: [-0.02, 1.02] };
  const values = panel.curves.flatMap((curve) => curve.y);
  if (values.every((value) => value === 0)) return { range: [-0.02, 1.02] };
  return { rangemode: values.every((value) => value >= 0) ? "tozero" : "normal" };
}

function layout(panel, range) {
  const axis = { gridcolor: color("line"), zeroline: false, linecolor: color("line"), automargin: true };
  return {
    margin: { l: 44, r: 8, t: 8, b: 34 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: color("quiet") },
    xaxis: { ...axis, range, title: { text: "step", standoff: 4 }, nticks: 6 },
    yaxis: { ...axis, ...valueRange(panel), nticks: 6, exponentformat: "power", minexponent: 4 },
    legend: { orientation: "h", y: -0.2, yanchor: "top", x: 0, font: { size: 12 } },
    hovermode: "x unified",
    hoverlabel: { bgcolor: color("raised"), bordercolor: color("line"), font: { color: color("ink") } },
  };
}

function draw(div) {
  const plot = plots.get(div);
  nearView.unobserve(div);
  plot.drawn = true;
  Plotly.react(div, plot.panel.curves.flatMap((curve) => traces(curve, plot.panel)), layout(plot.panel, plot.range), {
    responsive: true, displaylogo: false, modeBarButtons: [["toImage", "resetScale2d"]],
  });
}

function redraw() {
  for (const [div, plot] of plots) if (plot.drawn) draw(div);
}

// --- Rollouts: the list and its filters -----------------------------------------------------------------------------

const ROW_HEIGHT = 60;
const FILTERS = {
  run: "Run", split: "Split", answer: "Answer", reward: "Reward", stop: "Stop reason", call: "Call status",
  sentinel: "Sentinel", label: "Label",
};
const MOST_REWARDS = 12; // more values than these are no list to choose from
const rollouts = [];
const byId = new Map();
let found = [];
let opened = null;
let listTop = 0;

const sign = (rollout) => ({ right: "✓", wrong: "✗", "not graded": "·" })[rollout.answer];

function flatten(groups, runs) {
  for (const group of groups) {
    group.runName = runs[group.run].name;
    group.text = `${group.prompt}\n${group.problem}\n${group.solution}`.toLowerCase();
    group.question = group.prompt.trim().split("\n").filter((line) => !/^\w+:$/.test(line)).at(-1) ?? "";
    for (const rollout of group.rollouts) {
      rollout.group = group;
      rollout.id = [group.runName, group.split, group.step, group.group, rollout.index].join("/");
      rollout.answer = rollout.correct === null ? "not graded" : rollout.correct ? "right" : "wrong";
      rollout.text = rollout.pieces.map(([, text]) => text).join("").toLowerCase();
      rollout.tags = new Set(tags(rollout));
      rollouts.push(rollout);
      byId.set(rollout.id, rollout);
    }
  }
}

function tags(rollout) {
  return [
    `run:${rollout.group.runName}`, `split:${rollout.group.split}`, `answer:${rollout.answer}`,
    `reward:${number(rollout.reward)}`, `stop:${rollout.stop}`, ...rollout.calls.map(([status]) => `call:${status}`),
    ...rollout.sentinels.map((name) => `sentinel:${name}`), ...rollout.labels.map((key) => `label:${key}`),
  ];
}

function showFilters() {
  const counts = new Map();
  for (const rollout of rollouts) for (const tag of rollout.tags) counts.set(tag, (counts.get(tag) ?? 0) + 1);
  const controls = Object.entries(FILTERS).map(([kind, title]) => {
    const values = [...counts.keys()].filter((tag) => tag.startsWith(`${kind}:`));
    if (values.length < (kind === "run" ? 2 : 1) || (kind === "reward" && values.length > MOST_REWARDS)) return null;
    const options = values.sort().map((tag) =>
      el("option", { value: tag }, `${words(tag.slice(kind.length + 1))} (${count(counts.get(tag))})`));
    return el("label", {}, title, el("select", { name: kind }, el("option", { value: "" }, "any"), ...options));
  });
  $("filters").append(
    ...controls.filter(Boolean),
    el("label", {}, "Step from", el("input", { type: "number", name: "from" })),
    el("label", {}, "to", el("input", { type: "number", name: "to" })),
    el("label", { className: "search" }, "Text", el("input", { type: "search", name: "search",
      placeholder: "in prompts and completions" })),
    el("button", { type: "reset" }, "Reset"),
  );
  $("filters").addEventListener("input", filter);
  $("filters").addEventListener("reset", () => setTimeout(filter));
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("list").addEventListener("scroll", () => {
    listTop = $("list").scrollTop;
    showRows();
  });
  addEventListener("resize", showRows);
}

function filter() {
  const values = Object.fromEntries(new FormData($("filters")));
  const wanted = Object.keys(FILTERS).map((kind) => values[kind]).filter(Boolean);
  const from = values.from === "" ? -Infinity : +values.from;
  const to = values.to === "" ? Infinity : +values.to;
  const query = values.search.toLowerCase();
  found = rollouts.filter(({ group, tags, text }) =>
    group.step >= from && group.step <= to && wanted.every((tag) => tags.has(tag)) &&
    (query === "" || text.includes(query) || group.text.includes(query)));
  $("list").scrollTop = 0;
  showCount();
  showRows();
  highlight();
}

function showCount() {
  const { recorded, withText, withoutSegments } = page;
  const older = withoutSegments
    ? ` ${count(withoutSegments)} more, of an older version that did not record what was inserted, are not shown.`
    : "";
  const shown = rollouts.length === withText
    ? "all of them are in this page"
    : `${count(rollouts.length)} of them are in this page: whole groups, spread over the steps, some of each label`;
  const text = `Of ${count(recorded)} recorded rollouts ${count(withText)} have text; ${shown}.${older}`;
  $("count").textContent = `${count(found.length)} match. ${text}`;
}

function showRows() {
  const first = Math.max(0, Math.floor($("list").scrollTop / ROW_HEIGHT) - 4);
  const last = first + Math.ceil($("list").clientHeight / ROW_HEIGHT) + 8;
  $("rows").style.height = `${found.length * ROW_HEIGHT}px`;
  $("rows").replaceChildren(...found.slice(first, last).map((rollout, place) => row(rollout, first + place)));
}

function row(rollout, place) {
  const { group } = rollout;
  const node = el("button", { className: "row", onclick: () => (location.hash = link(rollout)) },
    el("span", { className: rollout.answer, title: rollout.answer }, sign(rollout)),
    el("span", {}, `${page.runs.length > 1 ? `${group.runName} · ` : ""}step ${group.step} · ${group.split} · ` +
      `${group.group}.${rollout.index}`),
    el("span", {}, `reward ${number(rollout.reward)}`),
    el("span", { className: "snippet" }, group.question));
  node.style.top = `${place * ROW_HEIGHT}px`;
  if (rollout === opened) node.setAttribute("aria-current", "true");
  return node;
}

// --- Rollouts: one of them ------------------------------------------------------------------------------------------

const link = (rollout) => `#r=${rollout.id.split("/").map(encodeURIComponent).join("/")}`;

function chip(rollout, text) {
  const node = el("a", { className: "chip", href: link(rollout), title: rollout.answer }, text);
  node.style.textDecoration = "none";
  if (rollout === opened) node.setAttribute("aria-current", "true");
  return node;
}

function open(rollout) {
  opened = rollout;
  $("rollouts-tab").classList.toggle("reading", rollout !== null);
  showDetail();
  $("list").scrollTop = listTop; // a list that was hidden has forgotten it
  const top = found.indexOf(rollout) * ROW_HEIGHT;
  const { scrollTop, clientHeight } = $("list");
  if (top >= 0 && (top < scrollTop || top + ROW_HEIGHT > scrollTop + clientHeight)) {
    $("list").scrollTop = top - clientHeight / 3;
  }
  if ($("browser").getBoundingClientRect().top < 0) $("browser").scrollIntoView();
  showRows();
  highlight();
}

function showDetail() {
  if (opened === null) {
    $("detail").replaceChildren(el("p", { className: "quiet" }, "Choose a rollout."));
    return;
  }
  const { group } = opened;
  const notes = opened.labels.map((key) => [key, rule(key)]);
  notes.push(...opened.sentinels.map((name) => [name, "sentinel"]));
  $("detail").replaceChildren(...[
    el("div", { className: "steps" },
      el("button", { className: "back", onclick: () => (location.hash = "#rollouts") }, "← list"),
      el("button", { onclick: () => step(-1), title: "key k" }, "previous"),
      el("button", { onclick: () => step(1), title: "key j" }, "next")),
    el("h2", {}, `Step ${group.step}, ${group.split}: rollout ${opened.index} of group ${group.group}`),
    el("div", { className: "chips" },
      ...notes.map(([name, title]) => el("span", { className: "chip", title }, words(name)))),
    facts(),
    siblings(group.rollouts),
    el("h3", {}, "Prompt"),
    el("div", { className: "text prompt" }, group.prompt),
    el("h3", {}, "Completion"),
    el("p", { className: "legend" },
      ...[["", "trained text"], ["code", "trained code"], ["inserted", "inserted, masked"]]
        .map(([className, text]) => el("span", {}, el("i", { className }), text))),
    el("div", { className: "text" },
      ...opened.pieces.map(([kind, text]) => el("span", { className: ["", "code", "inserted"][kind] }, text))),
    calls(),
  ].filter(Boolean));
}

function facts() {
  const { group } = opened;
  const rewards = Object.entries(opened.rewards ?? {}).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  return el("dl", {}, ...Object.entries({
    "Extracted answer": opened.extracted ?? "none",
    Solution: group.solution,
    Verdict: `${opened.answer}${opened.reason ? ` (${words(opened.reason)})` : ""}`,
    Reward: `${number(opened.reward)}${rewards ? ` (${rewards})` : ""}`,
    Advantage: number(opened.advantage),
    "Stop reason": opened.stop && words(opened.stop),
    Problem: group.problem,
    Run: group.runName,
  }).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value ?? "–")]));
}

function siblings(members) {
  if (members.length === 1) return null;
  return el("div", {}, el("h3", {}, `Group: ${members.length} rollouts of this prompt (reward · advantage)`),
    el("div", { className: "chips" }, ...members.map((member) =>
      chip(member, `${sign(member)} ${number(member.reward)} · ${number(member.advantage, 2)}`))));
}

function calls() {
  if (!opened.calls.length) return el("p", { className: "quiet" }, "No calls.");
  return el("div", {}, el("h3", {}, "Calls"), table(["", "status", "seconds", "seconds in the queue"],
    opened.calls.map(([status, seconds, queue], place) => [place + 1, words(status), seconds, queue])));
}

function table(head, rows) {
  const cell = (tag, value) => typeof value === "number"
    ? el(tag, { className: "number" }, number(value, 4)) : el(tag, {}, value ?? "–");
  return el("div", { className: "wide" }, el("table", {},
    el("tr", {}, ...head.map((text) => cell("th", text))),
    ...rows.map((values) => el("tr", {}, ...values.map((value) => cell("td", value))))));
}

function highlight() {
  if (!CSS.highlights) return;
  const query = $("filters").elements.search.value.toLowerCase();
  const ranges = [];
  const texts = document.createTreeWalker($("detail"), NodeFilter.SHOW_TEXT);
  while (query && texts.nextNode()) {
    const text = texts.currentNode.data.toLowerCase();
    for (let at = text.indexOf(query); at >= 0; at = text.indexOf(query, at + query.length)) {
      ranges.push(new StaticRange({ startContainer: texts.currentNode, startOffset: at,
        endContainer: texts.currentNode, endOffset: at + query.length }));
    }
  }
  CSS.highlights.set("found", new Highlight(...ranges));
}

function step(by) {
  const place = found.indexOf(opened) + by;
  if (place < 0 || place >= found.length) return;
  history.replaceState(null, "", link(found[place])); // not a page of the history for each key
  route();
}

// --- Behaviours and the run -----------------------------------------------------------------------------------------

const rule = (key) => page.labels.find((label) => label.key === key)?.rule ?? "";

function showLabels() {
  const runs = page.runs.map(({ name }) => (page.runs.length > 1 ? name : "rollouts"));
  $("labels").append(el("tr", {}, ...["", "rule", ...runs, "examples"].map((text) => el("th", {}, text))));
  for (const { key, rule, counts, of } of page.labels) {
    const having = rollouts.filter((rollout) => rollout.labels.includes(key));
    const places = [...new Set([0, 1, 2].map((third) => Math.floor((having.length * third) / 3)))];
    const examples = places.map((place) => having[place]).filter(Boolean)
      .map((rollout) => chip(rollout, `step ${rollout.group.step}`));
    $("labels").append(el("tr", {}, el("td", {}, words(key)), el("td", {}, rule),
      ...counts.map((value, run) => el("td", { className: "number" }, el("small", {}, `${runs[run]}: `),
        `${count(value)} (${percent(value, of[run])})`)),
      el("td", {}, el("div", { className: "chips" }, ...examples))));
  }
}

function showRun(run) {
  const folded = (title, text) => text === null ? null
    : el("details", {}, el("summary", {}, title), el("pre", { className: "text" }, text));
  $("run-tab").append(...[
    el("h2", {}, run.name),
    run.evaluation && table(run.evaluation.head, run.evaluation.rows),
    run.command && el("h3", {}, "To repeat it"),
    run.command && el("pre", { className: "text" }, run.command),
    run.versions && el("h3", {}, "Versions, as the run recorded them"),
    run.versions && el("p", {}, run.versions.join(" · ")),
    folded("config.yaml, every option", run.config),
    folded("Settings of the evaluation", run.settings),
    folded("Data card", run.card),
  ].filter(Boolean));
}

function showDifferences() {
  if (!page.differences.length) return;
  $("run-tab").append(el("h2", {}, "Options in which the runs differ"),
    table(["", ...page.runs.map(({ name }) => name)], page.differences));
}

function showMachine() {
  $("run-tab").append(el("h2", {}, "The machine that made this page"),
    el("p", { className: "quiet" }, `As found at ${page.made}, when the page was made; the run may have had others.`),
    table(["", ""], Object.entries(page.machine)));
}

// --- Getting around -------------------------------------------------------------------------------------------------

const TABS = ["curves", "behaviours", "rollouts", "run"];

function route() {
  const hash = location.hash.slice(1);
  const wanted = hash.startsWith("r=") ? decodeURIComponent(hash.slice(2)) : null;
  const first = page.sections.length ? "curves" : "rollouts";
  const tab = wanted !== null ? "rollouts" : TABS.includes(hash) ? hash : first;
  for (const name of TABS) $(`${name}-tab`).hidden = name !== tab;
  for (const a of document.querySelectorAll("nav a")) {
    if (a.hash === `#${tab}`) a.setAttribute("aria-current", "page");
    else a.removeAttribute("aria-current");
  }
  if (tab !== "rollouts") return scrollTo(0, 0);
  open(byId.get(wanted) ?? null);
  if (wanted !== null && opened === null) {
    $("detail").replaceChildren(el("p", {}, `The rollout ${wanted} is not among those in this page.`));
    $("rollouts-tab").classList.add("reading");
  }
}

function onKey(event) {
  const typing = event.target.matches("input, select");
  if ($("rollouts-tab").hidden || typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "j") step(1);
  if (event.key === "k") step(-1);
  if (event.key === "/") {
    event.preventDefault();
    $("filters").elements.search.focus();
  }
}

function switchTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const current = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  document.documentElement.dataset.theme = current === "dark" ? "light" : "dark";
  redraw();
}

const page = JSON.parse(await inflate("data"));
document.body.append(el("script", { textContent: await inflate("plotly") })); // defines Plotly
flatten(page.rollouts, page.runs);
showSections($("panels"), page.sections);
showSections($("label-panels"), page.labelSections);
$("missing").textContent = page.sections.length
  ? page.missing.length ? `Not logged: ${page.missing.join(", ")}.` : ""
  : "No metrics were logged yet. (An evaluation has its results under Run.)";
$("paper-switch").hidden = !page.sections.some(({ panels }) =>
  panels.some(({ curves }) => curves.some(({ kind }) => kind === "paper")));
showLabels();
showFilters();
page.runs.forEach(showRun);
showDifferences();
showMachine();
filter();
$("loading").remove();
$("theme").onclick = switchTheme;
$("paper").onchange = redraw;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("hashchange", route);
addEventListener("keydown", onKey);
route();
