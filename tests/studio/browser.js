// What a browser sees of a page: run by tests/studio/test_site.py in a frame of its own server, once for each page.
const LUMINANCE = rgb => rgb.slice(0, 3).map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, k) => sum + c * [0.2126, 0.7152, 0.0722][k], 0);
function colour(text) {  // rgb(…), rgba(…) or color(srgb …), as computed styles have it
  const [r, g, b, alpha] = text.match(/[\d.]+/g).map(Number), unit = text.startsWith("color(") ? 255 : 1;
  return [unit * r, unit * g, unit * b, alpha ?? 1];
}
const over = (top, below) => [0, 1, 2].map(k => top[k] * top[3] + below[k] * (1 - top[3])).concat(1);

function background(element, view, known) {
  if (!element) return [255, 255, 255, 1];
  if (!known.has(element))
    known.set(element, over(colour(view.getComputedStyle(element).backgroundColor), background(element.parentElement, view, known)));
  return known.get(element);
}

function faint(document, view) {  // texts that do not stand out from what is behind them, one of each kind
  const found = new Set(), kinds = new Set(), known = new Map();
  for (const element of document.querySelectorAll("body *:not(svg *, script, style, noscript, dialog *)")) {
    const kind = [element, element.parentElement, element.parentElement.parentElement].map(e => e && `${e.tagName}.${e.className}`).join();
    if (kinds.has(kind) || ![...element.childNodes].some(n => n.nodeType == 3 && n.textContent.trim())) continue;
    if (!element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
    kinds.add(kind);
    const look = view.getComputedStyle(element), behind = background(element, view, known);
    const [a, b] = [LUMINANCE(over(colour(look.color), behind)), LUMINANCE(behind)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), size = parseFloat(look.fontSize);
    const large = size >= 24 || (size >= 18.6 && look.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) found.add(`${element.tagName}.${element.className} ${look.color} on ${behind.map(Math.round)}: ${ratio.toFixed(1)}`);
  }
  return [...found];
}

function small(document) {  // pictures whose letters, 13 px as they are drawn, come out below 11.5 px (the first page's have larger ones)
  return [...document.querySelectorAll("article :is(picture, .text_html) > img:not(.hero img)")].flatMap(image => {
    const size = 13 * image.clientWidth / (image.getAttribute("width") ?? image.naturalWidth);
    return size && size < 11.5 ? [`${image.alt.slice(0, 60)}: ${size.toFixed(1)} px`] : [];
  });
}

function jumps(page) {  // whether the tab key reaches the settings of Algorithm 1 before the bar and the bar is above them, or the other way round
  const [settings, bar] = ["#settings", "#transport"].map(name => page.querySelector(`.algorithm ${name}`));
  const [first, second] = [settings, bar].map(e => e?.getBoundingClientRect().top);
  return settings && Boolean(settings.compareDocumentPosition(bar) & Node.DOCUMENT_POSITION_FOLLOWING) !== first < second;
}

function given(page) {  // pictures that show an answer before the question is answered, or not even then
  return [...page.querySelectorAll("form.ask")].flatMap(form => {
    const picture = form.parentElement.nextElementSibling;
    if (!picture?.matches(".cell:has(img):not(:has(iframe))")) return [];
    const before = picture.querySelector("img").checkVisibility({ visibilityProperty: true });
    form.querySelector("input")?.click();
    form.requestSubmit();
    return before || !picture.querySelector("img").checkVisibility({ visibilityProperty: true }) ? [form.textContent] : [];
  });
}

function broken(page) {  // sentences of live pieces with a number that does not exist
  return [...page.querySelectorAll(":is(.piece, .algorithm) :is(p, text, td)")].map(e => e.textContent).filter(x => /NaN|undefined/.test(x));
}

async function look(address) {
  const frame = document.body.appendChild(document.createElement("iframe"));
  frame.style = "height: 900px; width: 390px; border: 0";
  await new Promise(done => { frame.onload = done; frame.src = address; });
  const page = frame.contentDocument, view = frame.contentWindow, seen = {};
  page.head.appendChild(page.createElement("style")).textContent = "* { transition: none !important; animation: none !important }";
  for (const fold of page.querySelectorAll("details")) fold.open = true;
  for (const width of [390, 768, 1280]) {
    frame.style.width = `${width}px`;
    await new Promise(requestAnimationFrame);
    const wide = page.documentElement.scrollWidth - width;
    if (wide > 0) (seen.overflow ??= []).push(`${wide} px at ${width}`);
    if (jumps(page)) (seen.jumps ??= []).push(width);
    await Promise.all([...page.images].map(image => image.decode().catch(() => null)));  // another width, another file
    const texts = small(page);
    if (texts.length) (seen.small ??= []).push(`at ${width}`, ...texts);
  }
  for (const theme of ["light", "dark"]) {
    page.documentElement.dataset.theme = theme;
    const texts = faint(page, view);
    if (texts.length) (seen.faint ??= []).push(theme, ...texts);
  }
  const sentences = broken(page);
  if (sentences.length) seen.broken = sentences;
  const answers = given(page);
  if (answers.length) seen.given = answers;
  const mute = [...page.querySelectorAll("article img")].filter(image => image.alt.length < 20 || !image.naturalWidth);
  if (mute.length) seen.pictures = mute.map(image => image.src);
  const cut = [...page.querySelectorAll("math")].filter(formula => formula.scrollHeight > formula.clientHeight);
  if (cut.length) seen.formulas = cut.map(formula => formula.textContent.replace(/\s+/g, " "));
  frame.remove();
  return seen;
}

async function main() {
  const seen = {};
  for (const address of await (await fetch("/list")).json()) {
    try { seen[address] = await look(address); } catch (error) { seen[address] = { error: `${error}` }; }
  }
  await fetch("/seen", { method: "POST", body: JSON.stringify(seen) });
}
main();
