const $ = id => document.getElementById(id);
const state = { images: [], dense: null, pruned: null, texts: false };

function say(text, bad = false) {
  $("status").textContent = text;
  $("status").className = bad ? "error" : "";
}
async function call(path, body) {
  const headers = { "Content-Type": "application/json" };
  if ($("key").value) headers.Authorization = `Bearer ${$("key").value}`;
  const answer = await fetch(path, body && { method: "POST", headers, body: JSON.stringify(body) });
  const data = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(data.error ? data.error.message : `the service returned status ${answer.status}`);
  return data;
}

// Images.
const read = file => new Promise((good, bad) => {
  const reader = new FileReader();
  reader.onload = () => good(reader.result);
  reader.onerror = () => bad(new Error(`${file.name} cannot be read`));
  reader.readAsDataURL(file);
});
async function add(uri, name, text = "") {
  const image = new Image();
  image.alt = name;
  image.src = uri;
  try { await image.decode(); } catch { throw new Error(`${name} is not an image`); }
  const box = make($("pictures"), "div", undefined, "picture");
  const button = make(box, "button");
  button.type = "button";
  button.title = button.ariaLabel = `Remove ${name}`;
  button.append(image);
  const caption = make(box, "textarea");
  caption.rows = 2;
  caption.placeholder = "caption";
  caption.ariaLabel = `Caption of ${name}`;
  caption.value = text;
  caption.hidden = !state.texts;
  caption.addEventListener("input", () => { $("results").hidden = true; });
  const entry = { uri, image, name, caption };
  state.images.push(entry);
  button.addEventListener("click", () => {
    state.images.splice(state.images.indexOf(entry), 1);
    const near = box.nextElementSibling ?? box.previousElementSibling;
    (near ? near.querySelector("button") : $("drop")).focus();
    box.remove();
    $("results").hidden = true; // it shows the ranking of other images
    say(count());
  });
}
const textOf = entry => state.texts ? entry.caption.value.trim() : "";
const isPdf = file => file.type === "application/pdf" || /\.pdf$/i.test(file.name);
// The service draws the pages of a PDF; each becomes an image with its own text as the caption.
async function addPdf(file) {
  say(`reading ${file.name} …`);
  const pdf = await read(file);
  const { documents } = await call("/v1/pages", { query: "pages", documents: [{ pdf }] })
    .catch(error => { throw new Error(`${file.name}: ${error.message}`); });
  for (const [i, { images, text }] of documents.entries()) await add(images[0], `${file.name}, page ${i + 1}`, text);
}
const count = () => `${state.images.length} image${state.images.length === 1 ? "" : "s"}`;
async function addFiles(files) {
  const problems = [];
  for (const file of files) {
    try { await (isPdf(file) ? addPdf(file) : add(await read(file), file.name)); }
    catch (error) { problems.push(error.message); }
  }
  say([count(), ...problems].join("; "), problems.length > 0);
}
function clear() {
  state.images = [];
  $("pictures").replaceChildren();
  $("results").hidden = true;
  say("");
}
const drop = $("drop");
drop.addEventListener("click", () => $("files").click());
for (const [kind, over] of [["dragover", true], ["dragleave", false], ["drop", false]])
  addEventListener(kind, event => { event.preventDefault(); drop.classList.toggle("over", over); });
addEventListener("drop", event => addFiles(event.dataTransfer.files));
$("files").addEventListener("change", async event => {
  await addFiles([...event.target.files]);
  event.target.value = ""; // allows choosing the same file again
});
$("clear").addEventListener("click", clear);
for (const button of document.querySelectorAll(".sample")) button.addEventListener("click", async () => {
  clear();
  say("loading samples …");
  const { world } = button.dataset;
  try {
    const sample = await call(`/v1/sample?world=${world}&seed=${Math.floor(Math.random() * 1000)}`);
    const name = world === "photos" ? "photograph" : "scene";
    for (const [i, uri] of sample.images.entries()) await add(uri, `${name} ${i + 1}`);
    $("query").value = sample.query;
    say(`${count()}; press Rank`);
  } catch (error) { say(error.message, true); }
});

// Ranking.
$("keep").addEventListener("input", () => { $("kept").textContent = `${$("keep").value}%`; });
$("form").addEventListener("submit", async event => {
  event.preventDefault();
  if (state.images.length < 2) { say("add at least two images", true); return; }
  $("rank").disabled = true;
  say("ranking …");
  try {
    const documents = state.images.map(entry => {
      const text = textOf(entry);
      return text ? { image: entry.uri, text } : { image: entry.uri };
    });
    const body = { query: $("query").value, documents, return_survivors: true };
    const dense = await call("/v1/rerank", { ...body, method: "dense" });
    const pruned = await call("/v1/rerank", { ...body, method: $("method").value, keep: $("keep").value / 100 });
    Object.assign(state, { dense, pruned });
    const cut = pruned.meta.cut?.length;
    say(`${count()} ranked; ${show()} changed places` + (cut ? `; captions cut to the model's limit: ${cut}` : ""));
  } catch (error) { say(error.message, true); }
  $("rank").disabled = false;
});
function show() {
  const report = state.pruned.pruning.at(-1), whole = state.dense.pruning.at(-1);
  // Both requests share cached image features, so only the time of the decoder and of pruning is compared.
  const seconds = r => r.seconds.decoder + r.seconds.prior + r.seconds.selection;
  $("pruned-name").textContent = `${report.method}, ${Math.round(100 * report.keep)}% kept`;
  $("facts").replaceChildren();
  for (const [value, name] of [
    [`${report.visual_tokens} → ${report.visual_tokens_left}`, "visual tokens"],
    [`${Math.round(100 * report.flops_saved)}%`, "FLOPs saved"],
    [`${Math.round(100 * report.kv_saved)}%`, "KV cache saved"],
    [`${Math.round(1000 * seconds(whole))} → ${Math.round(1000 * seconds(report))} ms`, "decoder, dense → pruned"]]) {
    const box = make($("facts"), "div");
    make(box, "b", value);
    make(box, "span", name);
  }
  const stages = [{ label: "all tokens" }, ...report.stages.map(s => ({
    label: `${s.when} layer ${s.layer}: ${s.before} → ${s.after}` + (s.alpha == null ? "" : `, α = ${s.alpha.toFixed(2)}`),
    alive: s.survivors }))];
  const slider = $("stage");
  slider.max = stages.length - 1;
  slider.value = slider.max;
  const before = new Map(state.dense.results.map((r, place) => [r.index, place]));
  grid($("dense"), state.dense.results, null);
  const canvases = grid($("pruned"), state.pruned.results, before);
  const draw = () => {
    const stage = stages[slider.value];
    $("stage-name").textContent = slider.ariaValueText = stage.label;
    for (const [index, canvas] of canvases) {
      const place = report.indices.indexOf(index);
      const { image } = state.images[index];
      paint(canvas, image, report.blocks[place], place < 0 ? null : stage.alive?.[place], scaleOf(image));
    }
  };
  slider.oninput = draw;
  draw();
  $("results").hidden = false;
  return state.pruned.results.filter((r, place) => before.get(r.index) !== place).length;
}
function grid(box, results, before) {
  box.replaceChildren();
  return results.map((result, place) => {
    const item = make(box, "li");
    const entry = state.images[result.index], { image, name } = entry;
    const canvas = make(item, "canvas");
    paint(canvas, image, [], null, scaleOf(image));
    const moved = before ? before.get(result.index) - place : 0;
    canvas.role = "img";
    canvas.ariaLabel = `rank ${place + 1}: ${name}` + (moved ? `, ${Math.abs(moved)} ${moved > 0 ? "up" : "down"}` : "");
    const caption = make(item, "div", undefined, "caption");
    make(caption, "span", `${place + 1}` + (moved > 0 ? ` ▲${moved}` : moved < 0 ? ` ▼${-moved}` : ""),
      moved > 0 ? "up" : moved < 0 ? "down" : "");
    make(caption, "span", result.relevance_score.toFixed(3));
    if (textOf(entry)) make(item, "div", textOf(entry), "text").title = textOf(entry);
    return [result.index, canvas];
  });
}
const scaleOf = image =>
  Math.min(1, 360 / Math.max(image.naturalWidth, image.naturalHeight)) * (image.naturalWidth < 180 ? 2 : 1);

// The layer profile.
function plot(profile) {
  const [w, h, pad] = [720, 220, 34], n = profile.layers.length;
  const x = i => pad + (i / Math.max(1, n - 1)) * (w - 2 * pad), y = v => h - pad - v * (h - 2 * pad);
  const ns = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(ns, "svg");
  svg.setAttribute("viewBox", `0 0 ${w} ${h}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", "H_norm and alpha of each layer; bars mark the layers that prune");
  const add = (tag, attributes, text) => {
    const node = svg.appendChild(document.createElementNS(ns, tag));
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
  };
  for (const value of [0, 0.5, 1]) {
    add("line", { x1: pad, x2: w - pad, y1: y(value), y2: y(value), stroke: "#e5e7eb" });
    add("text", { x: pad - 6, y: y(value) + 4, "font-size": 11, "text-anchor": "end" }, value);
  }
  for (const layer of profile.schedule)
    add("rect", { x: x(profile.layers.indexOf(layer)) - 5, y: pad, width: 10, height: h - 2 * pad, fill: "#dbeafe" });
  const line = (values, colour) => add("polyline", { fill: "none", stroke: colour, "stroke-width": 2,
    points: values.map((v, i) => `${x(i)},${y(v)}`).join(" ") });
  if (profile.h_norm) line(profile.h_norm, "#9ca3af");
  line(profile.alpha, "#0b5fa5");
  profile.layers.forEach((layer, i) => {
    if (n <= 16 || layer % 4 === 0) add("text", { x: x(i), y: h - 12, "font-size": 11, "text-anchor": "middle" }, layer);
  });
  add("text", { x: pad, y: 18, "font-size": 12, fill: "#0b5fa5" }, "α (trust in the prior)");
  add("text", { x: pad + 170, y: 18, "font-size": 12, fill: "#6b7280" }, "H_norm");
  add("text", { x: pad + 250, y: 18, "font-size": 12, fill: "#1d5bbf" }, "▮ layers that prune");
  $("plot").replaceChildren(svg);
  $("profile").hidden = false;
}
try {
  const about = await call("/v1/about");
  $("model").textContent = `Model: ${about.model}.`;
  $("lock").hidden = !about.locked;
  state.texts = about.texts;
  for (const { caption } of state.images) caption.hidden = !about.texts;
  $("note").textContent = about.texts
    ? "You can write or paste a caption under each image. Both are ranked as one document."
    : "This model reads images alone, so there are no captions.";
  $("keep").value = Math.round(100 * about.keep);
  $("keep").dispatchEvent(new Event("input"));
  for (const button of document.querySelectorAll(".sample"))
    button.hidden = !about.samples.includes(button.dataset.world);
  for (const name of about.methods) {
    const option = make($("method"), "option", name);
    option.value = name;
    option.selected = name === about.method;
  }
  if (about.profile) plot(about.profile);
} catch (error) { say(error.message, true); }
