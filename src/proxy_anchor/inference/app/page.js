"use strict";

const $ = (id) => document.getElementById(id);
let about = null;
let latest = 0; // the newest search; answers to older ones are dropped

function say(text, isError = false) {
  $("message").textContent = text;
  $("message").className = isError ? "error" : "";
}

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

async function ask(address, options) {
  const answer = await (await fetch(address, options)).json();
  if (answer.error) throw new Error(answer.error);
  return answer;
}

const k = () => Math.max(1, Math.min(about.max_k, Number.parseInt($("k").value, 10) || 10));

async function search(show, request) {
  const mine = ++latest;
  say("Searching ...");
  try {
    const answer = await request();
    if (mine !== latest) return;
    show(answer);
    $("results").replaceChildren(...answer.results.map(panel));
    say("");
  } catch (error) {
    if (mine === latest) say(error.message, true);
  }
}

function showQuery(source, caption) {
  const [image, text] = $("query").children;
  if (image.src.startsWith("blob:")) URL.revokeObjectURL(image.src);
  image.src = source;
  text.textContent = caption;
  $("query").hidden = false;
}

function upload(file) {
  // Checked here too, so that a wrong file is answered at once and not sent.
  if (!file.type.startsWith("image/")) return say(`${file.name} is not an image.`, true);
  if (file.size > about.max_bytes) {
    return say(`${file.name} is larger than ${Number((about.max_bytes / 2 ** 20).toPrecision(3))} MB.`, true);
  }
  return search(
    () => showQuery(URL.createObjectURL(file), file.name),
    () => ask(`api/search?k=${k()}`, { method: "POST", headers: { "Content-Type": file.type }, body: file }),
  );
}

function searchItem(model, id) {
  return search(
    (answer) => showQuery(`thumbnail/${model}/${id}`, answer.name),
    () => ask(`api/search/${model}/${id}?k=${k()}`),
  );
}

function panel(result, model) {
  const { name, images } = about.models[model];
  const vote = result.class === null ? ""
    : ` – class by vote: ${result.class} (${Math.round(100 * result.share)} %)`;
  const hits = result.hits.map((hit) => {
    const button = element("button", {
      type: "button", className: hit.is_match ? "hit match" : "hit", title: `search from ${hit.name}`,
      onclick: () => searchItem(model, hit.id),
    });
    button.append(
      element("img", { src: `thumbnail/${model}/${hit.id}`, alt: hit.name }),
      element("span", { className: "similarity", textContent: (hit.is_match ? "match " : "") + hit.similarity.toFixed(3) }),
      element("span", { textContent: hit.label ?? "" }),
      element("span", { textContent: hit.name.split(/[\\/]/).pop() }),
    );
    return button;
  });
  return element("section", {},
    element("h2", { textContent: `${name} (${images} images)${vote}` }),
    element("p", { textContent: result.error ?? "" }),
    element("div", { className: "hits" }, ...hits));
}

const colours = new Map();
function colour(label) {
  // The golden angle keeps neighbouring numbers apart, for any number of classes.
  if (!colours.has(label)) colours.set(label, `hsl(${(colours.size * 137.508) % 360} 70% 42%)`);
  return colours.get(label);
}

async function showMap() {
  $("map").hidden = !$("map").hidden;
  if ($("map").hidden || $("map").children.length) return;
  say("Drawing the map ...");
  try {
    for (const model of about.models.keys()) drawMap(model, (await ask(`api/map/${model}`)).points);
    say("");
  } catch (error) {
    say(error.message, true);
  }
}

function drawMap(model, points) {
  const size = 560;
  const margin = 12;
  const canvas = element("canvas", { width: size, height: size });
  const caption = element("p", { textContent: "Point at an image; click to search from it." });
  const context = canvas.getContext("2d");
  for (const point of points) {
    point.left = margin + point.x * (size - 2 * margin);
    point.top = size - margin - point.y * (size - 2 * margin);
    context.fillStyle = point.label === null ? "#555" : colour(point.label);
    context.beginPath();
    context.arc(point.left, point.top, 4, 0, 2 * Math.PI);
    context.fill();
  }
  const nearest = (event) => {
    const scale = size / canvas.getBoundingClientRect().width;
    const distance = (p) => Math.hypot(p.left - event.offsetX * scale, p.top - event.offsetY * scale);
    return points.reduce((best, each) => (distance(each) < distance(best) ? each : best));
  };
  canvas.onmousemove = (event) => {
    const point = nearest(event);
    caption.textContent = `${point.label ?? ""} ${point.name.split(/[\\/]/).pop()}`;
  };
  canvas.onclick = (event) => searchItem(model, nearest(event).id);
  const heading = element("h2", { textContent: about.models[model].name });
  $("map").append(element("div", {}, heading, canvas, caption));
}

async function start() {
  try {
    about = await ask("api/about");
  } catch (error) {
    return say(error.message, true);
  }
  $("k").max = about.max_k;
  $("file").onchange = () => {
    if ($("file").files.length) upload($("file").files[0]);
    $("file").value = ""; // so that the same file can be chosen again
  };
  for (const name of ["dragenter", "dragover"]) {
    document.addEventListener(name, (event) => { event.preventDefault(); $("drop").classList.add("over"); });
  }
  for (const name of ["dragleave", "drop"]) {
    document.addEventListener(name, (event) => { event.preventDefault(); $("drop").classList.remove("over"); });
  }
  document.addEventListener("drop", (event) => {
    if (event.dataTransfer.files.length) upload(event.dataTransfer.files[0]);
  });
  $("show-map").onclick = showMap;
  say(`Ready: ${about.models.map((each) => `${each.images} images`).join(", ")}.`);
}

start();
