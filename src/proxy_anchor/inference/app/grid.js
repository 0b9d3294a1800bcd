// Cards of images, the large view, the selection and its CSV file.

export const $ = (id) => document.getElementById(id);
export const handlers = {}; // set by page.js: search(image), choose(images), filter(class)
export const source = { version: "" }; // of the server: browsers keep pictures of one start of it

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

export const keyOf = (image) => `${image.model}/${image.id}`;
export const thumbnail = (image) => `thumbnail/${keyOf(image)}?v=${source.version}`;
export const original = (key) => `image/${key}?v=${source.version}`;
const spoken = (image) => [image.label, image.name].filter(Boolean).join(", ");

function verdict(image) {
  if (image.is_match === undefined || image.is_match === null) return "";
  return image.is_match ? "match" : "no match";
}

/** A list item; first: what a click on the picture does, "open" or "search". */
export function card(image, first) {
  const item = element("li", { className: image.is_match ? "card match" : "card", image });
  item.style.setProperty("--ratio", Math.max(0.5, Math.min(2.5, image.ratio)));
  const actions = { open: () => openLarge(item), search: () => handlers.search(image) };
  const words = { open: "Open", search: "Search with" };
  const button = (action, className, content) => element("button", {
    type: "button", className, ariaLabel: `${words[action]} ${spoken(image)}`, onclick: actions[action],
  }, content);
  const second = first === "open" ? "search" : "open";
  const picture = element("img", { loading: "lazy", src: thumbnail(image), alt: "", draggable: false });
  const box = element("input", { type: "checkbox", checked: selection.has(keyOf(image)), ariaLabel: `Select ${spoken(image)}` });
  box.onchange = () => select([image], box.checked);
  item.append(
    button(first, "picture", picture),
    element("label", { className: "pick" }, box),
    button(second, "second", second === "open" ? "Open" : "Search"),
    ...facts(image),
  );
  return item;
}

function facts(image) {
  const same = element("span", { className: "same", textContent: image.isSame ? "✓ " : "", title: "the query's class" });
  const similarity = element("b", { textContent: image.similarity === undefined ? "" : `${image.similarity.toFixed(3)} ` });
  const judged = element("span", { className: "verdict", textContent: `${verdict(image)} ` });
  return [
    element("p", { title: image.label ?? "" }, same, image.label ?? ""),
    element("p", { className: "quiet", title: image.path ?? image.name }, similarity, judged, image.name),
  ];
}

// The large view: the arrows go through the cards that are shown beside the opened one.

let opened = null;

const shown = () => [...opened.closest("section, #gallery").querySelectorAll(".card:not([hidden])")];

function openLarge(item) {
  opened = item;
  const image = item.image;
  const place = shown().indexOf(item);
  $("large-name").textContent = image.name;
  $("large-place").textContent = `${place + 1} of ${shown().length}`;
  $("large-facts").replaceChildren(...facts(image));
  $("large-facts").className = image.is_match ? "match" : "";
  $("large-path").textContent = image.path ?? "";
  const picture = $("large").querySelector("img");
  picture.src = original(keyOf(image));
  picture.alt = spoken(image);
  Object.assign($("large-download"), { href: picture.src, download: image.name });
  for (const button of $("large").querySelectorAll("[data-step]")) {
    button.ariaDisabled = String(!shown()[place + Number(button.dataset.step)]); // disabled, it would lose the focus
  }
  if (!$("large").open) $("large").showModal();
}

function step(by) {
  const next = shown()[shown().indexOf(opened) + by];
  if (next) openLarge(next);
}

export function startLarge() {
  const dialog = $("large");
  for (const button of dialog.querySelectorAll("[data-step]")) button.onclick = () => step(Number(button.dataset.step));
  $("large-close").onclick = () => dialog.close();
  $("large-search").onclick = () => { dialog.close(); handlers.search(opened.image); };
  dialog.onclick = (event) => { if (event.target === dialog) dialog.close(); };
  dialog.onkeydown = (event) => {
    if (event.key === "ArrowLeft") step(-1);
    if (event.key === "ArrowRight") step(1);
  };
  dialog.onclose = () => opened.querySelector(".picture").focus();
}

// The selection: images by "model/id".

export const selection = new Map();

export function select(images, isSelected) {
  for (const image of images) {
    if (isSelected) selection.set(keyOf(image), image);
    else selection.delete(keyOf(image));
  }
  for (const item of document.querySelectorAll(".card")) {
    item.querySelector("input").checked = selection.has(keyOf(item.image));
  }
  $("selection").hidden = !selection.size;
  $("selected").textContent = `${selection.size} selected`;
}

const COLUMNS = ["query", "model", "rank", "name", "path", "class", "similarity", "match"];

export function downloadCsv(images, modelNames) {
  const quoted = (value) => `"${String(value ?? "").replaceAll('"', '""')}"`;
  const rows = images.map((image) => [
    image.query, modelNames[image.model], image.rank, image.name, image.path, image.label, image.similarity, verdict(image),
  ]);
  const text = [COLUMNS, ...rows].map((row) => row.map(quoted).join(",")).join("\r\n") + "\r\n";
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  element("a", { href: url, download: "search.csv" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
