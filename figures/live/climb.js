/* The climb: one screen a rung. Everything comes from data.js, which Python writes from the record and the kernels. */
"use strict";

const { rungs, peers, made } = window.LIVE.climb;
const JUMPS = "full128"; // the shape whose six largest jumps have their factor below the bar at the end; one is of several changes
const SHAPES = ["full128", "causal128", "full64", "causal64"];
const asked = /^(full|causal)(64|128)$/.exec(ask.get("shape") || "");
const set = { mask: asked ? asked[1] : "full", d: asked ? asked[2] : "128" };
const shapeName = () => set.mask + set.d;
const form = $("settings");
form.innerHTML = choice("mask", "mask", [["full"], ["causal"]]) + choice("head dimension", "d", [["64"], ["128"]]);

// What is said --------------------------------------------------------------------------------------------------------

const rate = (x, name = shapeName()) => x.rate[name];
const share = (k) => rate(rungs[k]) / rate(peers[0]);
const ratio = (k, name = shapeName()) => rate(rungs[k], name) / rate(rungs[k - 1], name);
const words = (name) => `${name.replace(/\d/g, "")}, d ${name.replace(/\D/g, "")}`;
const loses = (k) => k > 0 && ratio(k) < 0.99;

function title() {
  const [first, last] = [percent(share(0)), percent(share(rungs.length - 1))];
  return `From ${first} to ${last} of ${peers[0].name.replace("-", "\u2011")} in ${rungs.length - 1} changes`;
}

/** What a change bought, together with the changes before it that belong to it. */
const jump = (k) => rate(rungs[k]) / rate(rungs[k - rungs[k].changes]);

/** What the change bought in this shape: within 1% we call it nothing. */
function gain(k) {
  if (k === 0) return "where the climb begins";
  const x = ratio(k);
  if (loses(k)) return `× ${x.toFixed(2)}: it loses here`;
  return x <= 1.01 ? `× ${x.toFixed(2)}: nothing gained here` : `× ${x.toFixed(2)} over rung ${rungs[k - 1].n}`;
}

/** The same change in the other three shapes. */
function elsewhere(k) {
  const others = SHAPES.filter((name) => name !== shapeName());
  return k
    ? `Elsewhere ${others.map((name) => `×\u00a0${ratio(k, name).toFixed(2)} (${words(name)})`).join(", ")}.`
    : "";
}

/** A sentence begins with a capital, but o_i, m and p are names. */
const sentence = (x) => (/^(a|[a-z]{2,})[ ;,]/.test(x) ? x[0].toUpperCase() + x.slice(1) : x);

// Code, lightly coloured ----------------------------------------------------------------------------------------------

const KEYWORDS = "def|return|for|while|in|if|else|elif|and|or|not|import|from|as|lambda|range";
const TOKEN = new RegExp(`(#.*$)|("(?:[^"\\\\]|\\\\.)*"|'(?:[^'\\\\]|\\\\.)*')|\\b(${KEYWORDS})\\b`, "g");

function code(text) {
  const e = make("code");
  let at = 0;
  for (const found of text.matchAll(TOKEN)) {
    e.append(text.slice(at, found.index), make(found[1] ? "em" : found[2] ? "q" : "strong", "", found[0]));
    at = found.index + found[0].length;
  }
  e.append(text.slice(at));
  return e;
}

function difference(lines, label) {
  const e = make("div", "diff");
  e.setAttribute("role", "group");
  e.setAttribute("aria-label", label);
  const depth = (line) => line.slice(1).search(/\S/);
  const indent = Math.min(...lines.filter((line) => line !== "…").map(depth));
  for (const line of lines) {
    if (line === "…") {
      add(e, "cut", "div", "…");
      continue;
    }
    const mark = { "+": "plus", "-": "minus", " ": "" }[line[0]];
    const row = make("div", mark, make("s", "", line[0].replace("-", "−")), code(line.slice(1).trimStart()));
    row.style.setProperty("--in", `${Math.max(0, depth(line) - indent)}ch`);
    e.append(row);
  }
  return e;
}

// A rung --------------------------------------------------------------------------------------------------------------

function counters(rung, before) {
  const table = make("table", "", make("thead", "", make("tr", "", make("td"), make("td"), make("td"))), make("tbody"));
  const [, from, to] = table.tHead.rows[0].cells;
  from.textContent = before ? before.n : "";
  to.textContent = rung.n;
  for (const [name, old, now, unit, places] of rung.counters) {
    const show = (x) =>
      `${x.toLocaleString("en", { minimumFractionDigits: places })}${unit === "%" ? "%" : ` ${unit}`}`;
    const head = make("th", "", name);
    head.scope = "row";
    const cells = [make("td", "", old === null ? "" : show(old)), make("td", "to", old === null ? "" : "→ ")];
    cells[1].append(make("b", "", show(now)));
    table.tBodies[0].append(make("tr", "", head, ...cells));
  }
  return table;
}

const paragraph = (e, className, text) => text && add(e, className, "p", text);

/** A rung's name and speed, its reasons, and the change in code. */
function change(k) {
  const [rung, before, next] = [rungs[k], rungs[k - 1], rungs[k + 1]];
  const e = make("article", "rung change");
  const about = rung.cause ? `: ${rung.cause}` : "";
  e.append(make("h2", "", make("small", "", `Rung ${rung.n}, change ${k} of ${rungs.length - 1}${about}`), rung.name));
  paragraph(e, `gain${loses(k) ? " loss" : ""}`, `${Math.round(rate(rung))} TFLOP/s, ${gain(k)}`);
  paragraph(e, "says", sentence(rung.says));
  e.append(reasons(k));
  const lines = `${rung.plus} ${rung.plus === 1 ? "line" : "lines"} in, ${rung.minus} out`;
  add(e, "", "h3", before ? `The difference to rung ${before.n}: ${lines}` : `From ${rung.file}`);
  e.append(difference(rung.diff, `Part of ${rung.file}`));
  if (rung.whole.length > rung.diff.length) {
    const fold = make("details", "", make("summary", "", `All ${rung.plus + rung.minus} lines that differ`));
    fold.append(difference(rung.whole, `All of the difference to ${rung.file}`));
    e.append(fold);
  }
  if (next) paragraph(e, "note", `Next, rung ${next.n}, ${next.name}. What limits this one: ${next.limit}.`);
  return e;
}

/** What limited the rung before, what the change takes away, and what was predicted. */
function reasons(k) {
  const [rung, before] = [rungs[k], rungs[k - 1]];
  const e = make("section", "reasons");
  if (before) {
    add(e, "", "h3", `What limited rung ${before.n}: ${rung.limit}`);
    paragraph(e, "note", rung.waited);
    add(e, "", "h3", `What the change removes: ${rung.removes}`);
  }
  paragraph(e, "why", rung.why);
  paragraph(e, "forecast", forecast(k));
  paragraph(e, "note", rung.missed[shapeName()]);
  return e;
}

/** What was counted, and what the compiler made of the change. */
function counted(k) {
  const [rung, before] = [rungs[k], rungs[k - 1]];
  const e = make("section", "rung counted");
  const fold = make("details", "", make("summary", "", "Other settings, compiled code, and what is counted"));
  paragraph(fold, "note", elsewhere(k));
  paragraph(fold, "note", rung.compiled[shapeName()]);
  if (rung.counters.length) {
    e.append(counters(rung, before));
    paragraph(fold, "note", "Counted at d = 128 without a mask. A wait is in clocks of a warp per instruction that it issues.");
  }
  e.append(fold);
  return e;
}

/** What was predicted for this shape before it was measured, beside the measurement. */
function forecast(k) {
  const x = rungs[k].predicted[shapeName()];
  if (!x) return "";
  const words = x.startsWith("≤") ? `At most × ${x.slice(2)}, if the tensor cores never stop` : `Predicted × ${x}`;
  return `${words}; measured × ${ratio(k).toFixed(2)}.`;
}

// The chart -----------------------------------------------------------------------------------------------------------

const chart = $("chart");
const lines = peers.slice(0, 2).map((peer, k) => {
  const e = make("div", `peer${k ? " under" : ""}`, make("span"));
  chart.append(e);
  return e;
});
const bars = rungs.map((rung, k) => {
  const e = make("a", "bar", make("i"), make("b"));
  e.href = `#r${rung.n}`;
  e.style.left = `${(100 * k) / rungs.length}%`;
  e.style.width = `${100 / rungs.length}%`;
  e.onclick = (event) => {
    event.preventDefault();
    transport.jump(k);
  };
  chart.append(e);
  return e;
});

/** At the end of the climb, the factor of a jump, below which are its changes if it has several. */
function together(k) {
  const { changes } = rungs[k];
  if (!changes || shapeName() !== JUMPS) return "";
  return `×${jump(k).toFixed(1)}${changes > 1 ? `\n${k - changes + 1}–${k}` : ""}`;
}

/** The side to which the factor of a jump moves, away from its neighbour's. */
const beside = (k) => (rungs[k + 1]?.changes ? "to-left" : rungs[k - 1]?.changes ? "to-right" : "");

function drawChart(n) {
  const most = 1.05 * Math.max(...[...rungs, ...peers].map((x) => rate(x)));
  lines.forEach((e, k) => {
    e.style.bottom = `${(100 * rate(peers[k])) / most}%`;
    e.firstChild.textContent = `${peers[k].name}: ${Math.round(rate(peers[k]))}`;
  });
  bars.forEach((e, k) => {
    e.style.setProperty("--height", rate(rungs[k]) / most);
    e.className = `bar${loses(k) ? " loses" : ""}${k > n ? " ahead" : ""}`;
    e.tabIndex = k === n ? 0 : -1; // one stop for the tab key; the arrow keys go on from there
    if (k === n) e.setAttribute("aria-current", "step");
    else e.removeAttribute("aria-current");
    const said = `${rungs[k].n} ${rungs[k].name}: ${Math.round(rate(rungs[k]))} TFLOP/s`;
    e.setAttribute("aria-label", `${said}, ${gain(k)}`);
    e.onpointerenter = e.onfocus = () => ($("share").textContent = said);
    e.onpointerleave = e.onblur = () => ($("share").textContent = shown(n));
    const [label, all] = [e.lastChild, n === rungs.length - 1];
    label.className = all && rungs[k].changes ? beside(k) : "";
    label.textContent = all ? together(k) : k && k === n ? `×${ratio(k).toFixed(2)}` : "";
  });
  let end = -Infinity; // a label that would touch the one before it is left out
  for (const { lastChild: label } of bars) {
    if (!label.textContent) continue;
    const { left, right } = label.getBoundingClientRect();
    if (left < end + 2) label.textContent = "";
    else end = right;
  }
}

const transport = new Transport($("transport"), { draw, dwell: () => 2500, t: fromAddress() });

chart.onkeydown = (e) => {
  const { t, last } = transport;
  const to = { ArrowLeft: t - 1, ArrowRight: t + 1, Home: 0, End: last }[e.key];
  if (to === undefined || e.ctrlKey || e.metaKey || e.altKey) return;
  e.preventDefault();
  transport.jump(to);
  bars[transport.t].focus();
};

/** The rung that the address names, as #r08, or else the highest jump. */
function fromAddress() {
  const asked = rungs.findIndex((rung) => location.hash === `#r${rung.n}`);
  const gains = rungs.map((_, k) => (k ? ratio(k) : 0));
  return asked < 0 ? gains.indexOf(Math.max(...gains)) : asked;
}

const shown = (n) => `${percent(share(n))} of ${peers[0].name}`;

function draw(n) {
  document.title = title();
  $("title").textContent = title();
  $("speed").textContent = Math.round(rate(rungs[n]));
  $("share").textContent = shown(n);
  drawChart(n);
  $("rung").replaceChildren(change(n), counted(n));
  const address = `${location.search}#r${rungs[n].n}`;
  if (location.protocol !== "about:" && location.hash !== `#r${rungs[n].n}`) history.replaceState(null, "", address);
}

form.oninput = () => {
  read(form, set);
  remember({ shape: shapeName() });
  transport.show();
};
addEventListener("hashchange", () => transport.jump(fromAddress()));

let from = null; // a swipe to the side is a step; up and down is scrolling, as always
addEventListener("touchstart", (e) => (from = e.touches.length === 1 ? e.touches[0] : null), { passive: true });
addEventListener("touchend", (e) => {
  if (!from || e.target.closest("input, .diff")) return;
  const [x, y] = [e.changedTouches[0].clientX - from.clientX, e.changedTouches[0].clientY - from.clientY];
  if (Math.abs(x) > 60 && Math.abs(x) > 2 * Math.abs(y)) transport.step(x < 0 ? 1 : -1);
  from = null;
});

$("made").textContent = `${made}. An empty bar is a change that loses in this shape, and a pale one is still to come. Step with ← and →, the bars, or a swipe.`;
mark(form, set);
transport.length(rungs.length);
transport.show();
onWidth(chart, () => drawChart(transport.t));
