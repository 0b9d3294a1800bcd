// The page's state, which its address holds, and what is shown of it.
//
// state.query: "model/id" of a gallery image, "uN" of an own picture, "selection", or "" on the start page.

import { $, card, downloadCsv, element, handlers, keyOf, original, select, selection, source, startLarge } from "./grid.js";
import { mark, showPoints, startMap } from "./map.js";
import { cut, keep, showBox, startBox, startFiles, uploads } from "./own.js";

const TODAY = Math.floor(Date.now() / 864e5); // other images every day
const DEFAULTS = { query: "", box: "", k: "20", class: "", min: "0", order: "random", seed: String(TODAY), map: "", model: "0" };
const start = { scroll: 0, focus: null }; // of the start page, for the way back
const gallery = { asked: "", loaded: 0, total: 0 };
let about = null;
let state = null; // none is shown yet
let latest = 0; // the newest search; answers to older ones are dropped
let results = []; // one per model, of the search that is shown
let complaint = ""; // about files, to be shown when the search of the others is done
let mapped = null; // the model whose map is drawn
let pending = {}; // changes of goSoon
let timer = 0;

function say(text, isError = false) {
  $("message").textContent = text;
  $("message").className = isError ? "error" : "";
}

async function ask(address, options) {
  const answer = await (await fetch(address, options)).json();
  if (answer.error) throw new Error(answer.error);
  return answer;
}

const offerClasses = (classes) => $("classes").replaceChildren(...classes.map((value) => element("option", { value })));
const isGallery = (query) => query.includes("/");
const counted = (number) => number.toLocaleString("en");

/** Give the focus to an element where its former place is gone. */
function keepFocus(element) {
  if (document.activeElement === document.body || !document.activeElement.checkVisibility()) {
    element.focus({ preventScroll: true });
  }
}

function read() {
  const given = Object.fromEntries(new URLSearchParams(location.search));
  return Object.fromEntries(Object.keys(DEFAULTS).map((key) => [key, given[key] ?? DEFAULTS[key]]));
}

/** Change the state; a new query is a step of the history, a filter is not. */
function go(changes, isStep = false) {
  const next = { ...state, ...pending, ...changes };
  pending = {};
  clearTimeout(timer);
  const kept = Object.entries(next).filter(([key, value]) => value !== DEFAULTS[key]);
  const address = kept.length ? `?${new URLSearchParams(kept)}` : location.pathname;
  history[isStep ? "pushState" : "replaceState"](null, "", address);
  show(next);
}

/** The same a moment later, for changes that come one by one, such as typed letters. */
function goSoon(changes) {
  Object.assign(pending, changes);
  clearTimeout(timer);
  timer = setTimeout(go, 200);
}

const goQuery = (query) => go({ query, box: "", class: "" }, true);
const searchImage = (image) => goQuery(keyOf(image));

function show(next) {
  const before = state;
  const differs = (...keys) => !before || keys.some((key) => before[key] !== next[key]);
  if (before && !before.query && next.query) Object.assign(start, { scroll: scrollY, focus: document.activeElement });
  state = next;
  document.body.classList.toggle("start", !state.query);
  for (const id of ["k", "class", "min", "order"]) if ($(id).value !== state[id]) $(id).value = state[id];
  $("min-value").textContent = Number(state.min) ? Number(state.min).toFixed(2) : "any";
  if (!state.query) showStart(differs("query"));
  else if (differs("query", "box", "k")) search(differs("query", "box"));
  else filter();
  mark({ label: state.class });
  if (differs("map", "model")) showMap();
}

// The start page: the whole gallery, loaded as it is scrolled.

function showStart(isReturn) {
  latest += 1; // a search on its way is no longer wanted
  say("");
  const options = new URLSearchParams({ order: state.order, class: state.class, seed: state.seed });
  if (gallery.asked !== String(options)) {
    Object.assign(gallery, { asked: String(options), loaded: 0, total: Infinity });
    loadMore();
  } else countGallery();
  if (!isReturn) return;
  results = [];
  $("results").replaceChildren();
  $("query").hidden = true;
  mark({ query: null, hits: new Map() });
  document.title = "Search by picture";
  offerClasses(about.models[0].classes);
  keepFocus(start.focus?.isConnected ? start.focus : $("gallery-title"));
  scrollTo(0, start.scroll);
}

async function loadMore() {
  const { asked, loaded, total } = gallery;
  if (loaded >= total) return;
  try {
    const part = await ask(`api/gallery/0?offset=${loaded}&${asked}`);
    if (asked !== gallery.asked || loaded !== gallery.loaded) return;
    const list = element("ul", { className: "grid", images: part.images });
    if (!loaded) $("gallery").replaceChildren();
    $("gallery").append(list);
    fill(list, true);
    near.observe(list);
    Object.assign(gallery, { loaded: loaded + part.images.length, total: part.total });
    if (!state.query) countGallery();
  } catch (error) {
    return say(error.message, true);
  }
  end.unobserve($("more")); // anew after each part: the end may still be in sight
  end.observe($("more"));
}

const end = new IntersectionObserver((seen) => { if (seen.at(-1).isIntersecting) loadMore(); }, { rootMargin: "1200px" });
const near = new IntersectionObserver((seen) => {
  for (const { target, isIntersecting } of seen) if (!state.query) fill(target, isIntersecting);
}, { rootMargin: "3000px" });

/** Make the cards of a part that comes near the window, and remove those of one that is far. */
function fill(list, isNear) {
  if (isNear === list.hasChildNodes() || list.contains(document.activeElement)) return;
  list.style.height = isNear ? "" : `${list.offsetHeight}px`;
  list.replaceChildren(...(isNear ? list.images.map((image) => card({ ...image, model: 0 }, "search")) : []));
}

function countGallery() {
  const { images, classes } = about.models[0];
  const ofClasses = classes.length ? ` of ${counted(classes.length)} classes` : "";
  $("gallery-title").textContent = `Gallery: ${counted(images)} images${ofClasses}`;
  $("count").textContent = gallery.total < images ? `${counted(gallery.total)} shown` : "";
}

// Search and its results.

async function search(isNew) {
  const mine = ++latest;
  const asked = state;
  $("results").ariaBusy = "true";
  say("Searching ...");
  try {
    if (isNew) showQuery(asked);
    const answer = await answerTo(asked);
    if (mine !== latest) return;
    showResults(asked, answer);
    say(complaint, true);
    complaint = "";
    if (isNew) {
      $("query").scrollIntoView();
      $("heading").focus({ preventScroll: true });
    }
  } catch (error) {
    if (mine === latest) fail(error.message);
  } finally {
    if (mine === latest) $("results").ariaBusy = "false";
  }
}

/** Show an error on the start page: results of an earlier search would contradict it. */
function fail(text) {
  go({ query: "", box: "" });
  say(text, true);
  complaint = "";
}

async function answerTo({ query, box, k }) {
  if (query === "selection") return chosen();
  const item = isGallery(query) ? `api/search/${query}?k=` : null;
  if (item && !box) return ask(item + k);
  const file = item ? await (await fetch(original(query))).blob() : uploads.get(query).file;
  const body = box ? await cut(file, box) : file;
  const answer = await ask(`api/search?k=${k}`, { method: "POST", headers: { "Content-Type": body.type }, body });
  return item ? { ...answer, query: (await ask(`${item}1`)).query } : answer;
}

function chosen() {
  if (!selection.size) throw new Error("No image is selected.");
  const images = [...selection.values()];
  return { results: about.models.map((_, model) => ({ class: null, hits: images.filter((each) => each.model === model) })) };
}

function showQuery({ query, box }) {
  const isSelection = query === "selection";
  if (!isSelection && !isGallery(query) && !uploads.has(query)) {
    throw new Error("This picture is no longer here, because the page was loaded again: choose it once more.");
  }
  $("stage").hidden = $("box-hint").hidden = isSelection;
  if (!isSelection) $("stage").firstElementChild.src = uploads.get(query)?.url ?? original(query);
  showBox(box);
  $("whole").hidden = !box;
  $("heading").textContent = isSelection ? "Selected images" : uploads.get(query)?.file.name ?? "";
  $("facts").textContent = "";
  const own = [...uploads].map(([key, { file, url }]) => element("li", {}, element("button", {
    type: "button", ariaPressed: String(key === query), ariaLabel: `Results of ${file.name}`, onclick: () => goQuery(key),
  }, element("img", { src: url, alt: "", title: file.name }))));
  $("uploads").replaceChildren(...(own.length > 1 ? own : []));
  $("query").hidden = false;
}

function showResults(asked, answer) {
  if (answer.query) {
    $("heading").textContent = answer.query.name;
    $("facts").textContent = [answer.query.label, answer.query.path].filter(Boolean).join(" – ");
  }
  const query = $("heading").textContent + (asked.box ? " (part)" : "");
  $("stage").firstElementChild.alt = `Query: ${query}`;
  document.title = `${query} – Search by picture`;
  const label = answer.query?.label ?? null;
  results = answer.results.map((result, model) => ({ ...result, hits: result.hits.map((hit, place) => (
    { model, query, rank: place + 1, isSame: label !== null && hit.label === label, ...hit })) }));
  const hits = results.flatMap((each) => each.hits);
  $("results").replaceChildren(...results.map(panel));
  offerClasses([...new Set(hits.map((each) => each.label).filter(Boolean))].sort());
  filter();
  const own = asked.box ? "part" : asked.query; // a part of an image is another picture
  mark({ query: asked.query === "selection" ? null : own, hits: new Map(hits.map((hit) => [keyOf(hit), hit.similarity])) });
}

function panel(result, model) {
  const { name, images, threshold } = about.models[model];
  const vote = result.class === null ? "" : `Class by vote: ${result.class} (${Math.round(100 * result.share)} %)`;
  const limit = threshold === null ? "" : `match from ${threshold.toFixed(3)}`;
  const heading = element("h2", { textContent: `${name} (${counted(images)} images)`, hidden: about.models.length === 1 });
  const line = element("p", { className: "vote", textContent: result.error ?? [vote, limit].filter(Boolean).join(", ") });
  const cards = result.hits.map((hit) => card(hit, "open"));
  return element("section", {}, heading, line, element("ul", { className: "grid", ariaLabel: `Results of ${name}` }, ...cards));
}

function isWanted({ label, similarity }) {
  const isOfClass = (label ?? "").toLowerCase().includes(state.class.toLowerCase());
  return isOfClass && (!Number(state.min) || similarity === undefined || similarity >= Number(state.min));
}

function filter() {
  const cards = [...$("results").querySelectorAll(".card")];
  for (const each of cards) each.hidden = !isWanted(each.image);
  const left = cards.filter((each) => !each.hidden).length;
  $("count").textContent = left < cards.length ? `${left} of ${cards.length} shown` : `${cards.length} shown`;
}

function takeFiles(files) {
  const { added, complaint: found } = keep(files, about.max_bytes);
  complaint = found;
  if (added.length) return goQuery(added[0]);
  fail(complaint);
}

// The map.

async function showMap() {
  const { map, model } = state;
  $("map").hidden = !map;
  $("show-map").ariaPressed = String(Boolean(map));
  $("map-model").value = model;
  if (!map || mapped === model) return;
  $("map-title").textContent = "Map: being made ...";
  try {
    const { points } = await ask(`api/map/${model}`);
    if (model !== state.model) return;
    mapped = model;
    const { images } = about.models[model];
    $("map-title").textContent = `Map: ${counted(points.length)}${points.length < images ? ` of ${counted(images)}` : ""} images`;
    showPoints(points.map((each) => ({ ...each, model: Number(model) })));
  } catch (error) {
    $("map-title").textContent = "Map";
    say(error.message, true);
  }
}

function chooseOnMap(images) {
  if (!images.length) return;
  select([...selection.values()], false);
  select(images, true);
  if (state.query === "selection") search(true);
  else goQuery("selection");
}

function startControls() {
  const names = about.models.map((each) => each.name);
  $("filters").onsubmit = (event) => event.preventDefault();
  $("k").max = about.max_k;
  $("k").oninput = () => {
    const k = Number.parseInt($("k").value, 10);
    if (k) goSoon({ k: String(Math.max(1, Math.min(about.max_k, k))) });
  };
  $("class").oninput = () => goSoon({ class: $("class").value });
  $("min").oninput = () => {
    goSoon({ min: $("min").value }); // browsers limit how often an address changes
    show({ ...state, ...pending });
  };
  $("order").onchange = () => go({ order: $("order").value });
  $("shuffle").onclick = () => go({ seed: String(Number(state.seed) + 1) });
  $("export").onclick = () => downloadCsv(results.flatMap((each) => each.hits).filter(isWanted), names);
  $("export-selection").onclick = () => downloadCsv([...selection.values()], names);
  $("clear-selection").onclick = () => {
    select([...selection.values()], false);
    keepFocus(state.query ? $("heading") : $("gallery-title"));
  };
  $("show-selection").onclick = () => goQuery("selection");
  $("whole").onclick = () => go({ box: "" }, true);
  $("show-map").onclick = () => go({ map: state.map ? "" : "1" });
  $("home").onclick = (event) => { event.preventDefault(); goQuery(""); };
  $("map-model").append(...names.map((textContent, value) => element("option", { value, textContent })));
  $("map-model").hidden = names.length === 1;
  $("map-model").onchange = () => go({ model: $("map-model").value });
}

async function begin() {
  try {
    about = await ask("api/about");
  } catch (error) {
    return say(error.message, true);
  }
  source.version = about.version;
  Object.assign(handlers, { search: searchImage, choose: chooseOnMap, filter: (label) => go({ class: label }) });
  history.scrollRestoration = "manual";
  startFiles(takeFiles);
  startControls();
  startBox((box) => (box ? go({ box }, true) : showBox(state.box)));
  startLarge();
  startMap();
  window.onpopstate = () => { pending = {}; show(read()); };
  show(read());
}

begin();
