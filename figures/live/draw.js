/* What all pieces share: small helpers for a page, the bar that steps through a run, and a word with the page around. */
"use strict";

if (location.search) document.documentElement.dataset.ask = location.search.slice(1); // else of a page around
const ask = new URLSearchParams(document.documentElement.dataset.ask);
const $ = (id) => document.getElementById(id);
const within = (x, span) => span && span[0] <= x && x < span[1];

function make(tag, className = "", ...inside) {
  const e = document.createElement(tag);
  if (className) e.className = className;
  e.append(...inside);
  return e;
}

function add(parent, className = "", tag = "div", text = "") {
  const e = make(tag, className);
  if (text !== "") e.textContent = text;
  parent.append(e);
  return e;
}

function put(e, x, y, w, h) {
  Object.assign(e.style, { left: `${x}px`, top: `${y}px` });
  if (w != null) Object.assign(e.style, { width: `${w}px`, height: `${h}px` });
}

/** Keep what is set in the address, so that it can be sent to somebody. */
function remember(settings) {
  for (const [name, value] of Object.entries(settings)) {
    if (value === null || value === false || value === "") ask.delete(name);
    else ask.set(name, value === true ? "" : value);
  }
  if (location.protocol !== "about:") history.replaceState(null, "", `?${ask}${location.hash}`);
}

/** Write HTML only if it is another one, so that nothing flickers and no reader is told twice. */
function write(e, html) {
  if (e.written !== html) e.innerHTML = e.written = html;
}

/** Exponents and indices of a sentence as HTML. */
function typeset(text) {
  const raised = text.replace(/e\^\(((?:[^()]|\([^()]*\))*)\)/g, "e<sup>$1</sup>");
  return raised.replace(/([ℓm])_(new|j)/g, "$1<sub>$2</sub>");
}

const MARKS = { svg: "http://www.w3.org/2000/svg" };

/** An element of an SVG with its attributes. */
function shape(parent, tag, attributes = {}, text = "") {
  const e = document.createElementNS(MARKS.svg, tag);
  for (const [name, value] of Object.entries(attributes)) e.setAttribute(name, value);
  if (text !== "") e.textContent = text;
  parent.append(e);
  return e;
}

const grouped = (x) => Math.round(x).toLocaleString("en");
const percent = (x) => `${Math.round(100 * x)}%`;

/** A large number in words: 67.1 million. */
function large(x) {
  for (const [word, unit] of [
    ["trillion", 1e12],
    ["billion", 1e9],
    ["million", 1e6],
    ["thousand", 1e3],
  ])
    if (x >= unit) return `${(x / unit).toFixed(x >= 100 * unit ? 0 : 1)} ${word}`;
  return grouped(x);
}

/** A group of buttons of which one is on, or a single one that is on or off. */
function choice(title, name, options, type = "radio") {
  const labels = options.map(([value, text = value]) => {
    return `<label><input type="${type}" name="${name}" value="${value}"><span>${text}</span></label>`;
  });
  return `<fieldset><legend>${title}</legend>${labels.join("")}</fieldset>`;
}

/** A slider over some values, and the one that is set; a value that the address asks for is among them. */
function slider(name, label, values) {
  const asked = ask.has(name) ? Number(ask.get(name)) : values[0];
  const all = !values.includes(asked) ? [...values, asked].sort((a, b) => a - b) : values;
  const range = `type="range" name="${name}" min="0" max="${all.length - 1}" data-values="${all}"`;
  return `<label class="slider"><span><span>${label}</span><b></b></span><input ${range} aria-label="${label.replace(/<.*?>/g, "")}"></label>`;
}

/** An SVG emptied, as wide as its place and so high. */
function clear(stage, height) {
  stage.replaceChildren();
  stage.setAttribute("viewBox", `0 0 ${stage.clientWidth} ${height}`);
  stage.style.height = `${height}px`;
}

/** Check the buttons that say what is set; a slider shows its value. */
function mark(form, settings) {
  for (const e of form.elements) {
    if (e.type === "range") {
      e.value = e.dataset.values.split(",").indexOf(String(settings[e.name]));
      const value = typeof settings[e.name] === "number" ? settings[e.name].toLocaleString("en") : settings[e.name];
      e.previousElementSibling.lastChild.textContent = value;
      e.setAttribute("aria-valuetext", value);
    }
    if (e.tagName === "SELECT") e.value = settings[e.name];
    if (e.type === "radio") e.checked = e.value === String(settings[e.name]);
    if (e.type === "checkbox") e.checked = Boolean(settings[e.name]);
  }
}

/** What a form says: a number where the settings hold one. */
function read(form, settings) {
  const said = new FormData(form);
  for (const [name, now] of Object.entries(settings)) {
    const { dataset } = form.elements[name] || {};
    if (!dataset && !form.elements[name]) continue;
    const value = dataset?.values ? dataset.values.split(",")[said.get(name)] : said.get(name);
    if (typeof now === "boolean") settings[name] = value !== null;
    else if (value !== null) settings[name] = typeof now === "number" ? (value.trim() ? Number(value) : NaN) : value;
  }
}

/** A form sets what the address asks for, then what the reader does; `change` throws what it refuses, and why. */
function follow(form, set, change) {
  const first = { ...set };
  let soon = null; // a browser refuses too many addresses at once
  const keep = () => remember(Object.fromEntries(Object.keys(set).map((name) => [name, set[name] === first[name] ? null : String(set[name])])));
  const act = () => {
    $("refused").textContent = "";
    try {
      change();
    } catch (refused) {
      $("refused").textContent = `${refused.message}.`;
    }
  };
  form.oninput = () => {
    read(form, set);
    mark(form, set);
    clearTimeout(soon);
    soon = setTimeout(keep, 250);
    act();
  };
  for (const name of Object.keys(set)) if (ask.has(name)) set[name] = wanted(form.elements[name], set[name], ask.get(name));
  mark(form, set);
  act();
}

/** What an address asks of a setting, if it is one that the form has. */
function wanted(field, now, text) {
  if (typeof now === "number") return Number(text);
  if (typeof now === "boolean") return text !== "false";
  const values = [...(field.options || field)].map(({ value }) => value);
  return values.includes(text) ? text : now;
}

/** Back, play, forward and a slider over the steps of a run. `draw` is called with the step that is shown. */
class Transport {
  constructor(parent, { draw, dwell = () => 900, t = 0, speeds = false, anew = false }) {
    Object.assign(this, { draw, dwell, t, last: 0, timer: null, speed: 1, anew }); // anew: the first Play begins at 0
    const button = (text, label, title, act, more = "") => {
      const e = add(parent, more, "button", text);
      Object.assign(e, { type: "button", title, onclick: act });
      e.setAttribute("aria-label", label);
      return e;
    };
    parent.classList.add("transport");
    this.back = button("◂ Back", "Back one step", "←", () => this.step(-1));
    this.button = button("▶ Play", "Play", "space", () => this.play(), "play");
    this.next = button("Next ▸", "Next step", "→", () => this.step(1));
    this.slider = Object.assign(make("input"), { type: "range", min: 0, value: 0 });
    this.slider.setAttribute("aria-label", "Step");
    this.count = make("output");
    parent.append(this.slider, this.count);
    if (speeds) this.addSpeeds(parent);
    this.slider.oninput = () => this.jump(Number(this.slider.value));
    addEventListener("keydown", (e) => this.key(e));
    addEventListener("click", ({ detail, target }) => {
      if (detail && target.matches("[type=radio], [type=checkbox]")) target.blur(); // so that ← and → step on
    });
  }

  addSpeeds(parent) {
    const select = make("select", "speed");
    select.setAttribute("aria-label", "Speed");
    for (const [factor, text] of [[0.5, "× ½"], [1, "× 1"], [2, "× 2"], [4, "× 4"]]) select.append(new Option(text, factor)); // prettier-ignore
    this.speed = select.value = Number(ask.get("speed") || 1);
    select.oninput = () => {
      this.speed = Number(select.value);
      remember({ speed: this.speed === 1 ? null : this.speed });
    };
    parent.append(select);
  }

  /** A run with so many steps; t stays where it is, if there is such a step. */
  length(n) {
    this.last = n - 1;
    this.slider.max = this.last;
    this.t = Math.min(this.t, this.last);
  }

  show() {
    this.slider.value = this.t;
    this.count.textContent = `${this.t} / ${this.last}`;
    this.back.setAttribute("aria-disabled", this.t === 0); // not disabled: the button would lose the focus
    this.next.setAttribute("aria-disabled", this.t === this.last);
    this.draw(this.t);
  }

  go(t) {
    this.t = Math.min(Math.max(t, 0), this.last);
    if (this.t === this.last) this.pause();
    this.show();
  }

  jump(t) {
    this.anew = false;
    this.pause();
    this.go(t);
  }

  step(by) {
    this.jump(this.t + by);
  }

  pause() {
    clearTimeout(this.timer);
    this.timer = null;
    this.button.textContent = "▶ Play";
    this.button.setAttribute("aria-label", "Play");
  }

  play() {
    if (this.timer) {
      this.pause();
      this.show();
      return;
    }
    if (this.t === this.last || this.anew) this.t = 0;
    this.anew = false;
    this.button.textContent = "❚❚ Pause";
    this.button.setAttribute("aria-label", "Pause");
    this.tick();
    this.show();
  }

  tick() {
    this.timer = setTimeout(() => {
      this.go(this.t + 1);
      if (this.timer) this.tick();
    }, this.dwell(this.t) / this.speed);
  }

  key(e) {
    if (e.defaultPrevented || e.ctrlKey || e.metaKey || e.altKey) return;
    if (e.target.matches("input:not(.transport input), select, textarea, a, summary")) return;
    if (e.key === " " && e.target.matches("button")) return;
    const acts = {
      ArrowLeft: () => this.step(-1),
      ArrowRight: () => this.step(1),
      Home: () => this.jump(0),
      End: () => this.jump(this.last),
      " ": () => this.play(),
    };
    if (!acts[e.key]) return;
    e.preventDefault();
    acts[e.key]();
  }
}

/** The middle of a box for words of this half width, or a place right of it, if the line of the time is there. */
function inBox(x, width, half, now) {
  const middle = x + width / 2;
  return Math.abs(now - middle) < half && now + 2 * half < x + width ? now + half + 4 : middle;
}

/** Draw again whenever an element has another width. */
function onWidth(e, draw) {
  let wide = null;
  new ResizeObserver(() => {
    if (e.clientWidth === wide) return;
    wide = e.clientWidth;
    requestAnimationFrame(draw);
  }).observe(e);
}

// The page around: a piece in a frame takes its theme and says how high it is -------------------------------------------

function theme(name) {
  if (name) document.documentElement.dataset.theme = name;
}

/** Keep the bar in view, if so much of the frame's top is past the top of the window around. */
function keepInView(past) {
  const bar = document.querySelector(".transport, .tiles .picture");
  const top = bar.offsetTop - (parseFloat(bar.style.getPropertyValue("--past")) || 0);
  const most = document.body.clientHeight - top - bar.offsetHeight;
  bar.style.setProperty("--past", `${Math.min(most, Math.max(0, past - top))}px`);
}

function frame() {
  theme(ask.get("theme"));
  if (self === top) return;
  document.documentElement.classList.add("framed");
  let own = null; // the frame itself, where the browser lets us see it
  try {
    own = window.frameElement;
    const lab = parent.document.body.dataset.jpThemeLight; // JupyterLab
    if (lab) theme(lab === "false" ? "dark" : "light");
  } catch {
    own = null;
  }
  addEventListener("message", ({ data }) => {
    theme(data?.theme);
    if (Number.isFinite(data?.past)) keepInView(data.past);
  });
  addEventListener("keydown", ({ key }) => {
    if (key in { PageUp: 1, PageDown: 1 }) parent.postMessage({ turn: key === "PageUp" ? -1 : 1 }, "*"); // a deck's slide
  });
  const tell = () => {
    const height = Math.ceil(document.body.getBoundingClientRect().height);
    if (own) own.style.height = `${height}px`;
    parent.postMessage({ live: height }, "*");
  };
  new ResizeObserver(() => requestAnimationFrame(tell)).observe(document.body);
}
frame();
