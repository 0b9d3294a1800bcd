// The map of the gallery: zoom, pan, pinch, hover, lasso, keys.

import { $, element, handlers, keyOf, select, selection, thumbnail } from "./grid.js";

const MARGIN = 0.04; // around the points, whose positions are in [0, 1]
const WHOLE = { x: -MARGIN, y: -MARGIN, zoom: 1 / (1 + 2 * MARGIN) };
const LEGEND_CLASSES = 30;
const NEAREST = 5; // hits that give the approximate place of a query that is no point
const DIRECTIONS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

let points = []; // images with x, y, and left, top on the screen
let colours = new Map(); // class: colour, largest class first
let view = { ...WHOLE };
const marks = { query: null, hits: new Map(), label: "" };
let cursor = null; // the point under the pointer or chosen by keys
let lasso = null; // a path while it is drawn
const fingers = new Map(); // pointerId: [left, top], of the pointers that are down
let isMoved = false; // since the first of them was pressed
let isDue = false;

const canvas = () => $("plot").querySelector("canvas");
const isLit = (point) => (point.label ?? "").toLowerCase().includes(marks.label.toLowerCase());

export function showPoints(images) {
  const counts = new Map();
  for (const { label } of images) if (label !== null) counts.set(label, (counts.get(label) ?? 0) + 1);
  const largest = [...counts].sort((a, b) => b[1] - a[1]).map(([label]) => label);
  // The golden angle keeps neighbouring numbers apart, for any number of classes.
  colours = new Map(largest.map((label, place) => [label, `hsl(${(place * 137.508) % 360} 65% 50%)`]));
  points = images;
  view = { ...WHOLE };
  showLegend();
  mark({});
  point(null);
}

/** query: its key, any other string for one that is no image of the gallery, null for none; hits: key: similarity, the
    nearest first; label: part of the names of the classes that are lit. */
export function mark(changes) {
  Object.assign(marks, changes);
  for (const button of $("legend").querySelectorAll("button")) {
    button.ariaPressed = String(button.value === marks.label);
  }
  draw();
}

function showLegend() {
  const listed = [...colours].slice(0, LEGEND_CLASSES).map(([label, colour]) => {
    const dot = element("i");
    dot.style.background = colour;
    const onclick = () => handlers.filter(marks.label === label ? "" : label);
    return element("li", {}, element("button", { type: "button", value: label, onclick }, dot, label));
  });
  const left = colours.size - listed.length;
  if (left > 0) listed.push(element("li", { className: "hint", textContent: `and ${left} more` }));
  $("legend").replaceChildren(...listed);
}

function draw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => { isDue = false; paint(); });
}

function paint() {
  const { clientWidth: width, clientHeight: height } = canvas();
  const density = window.devicePixelRatio;
  Object.assign(canvas(), { width: width * density, height: height * density });
  const context = canvas().getContext("2d");
  context.scale(density, density);
  const text = getComputedStyle(canvas()).color;
  const side = Math.min(width, height);
  const indent = [(width - side) / 2, (height - side) / 2];
  const ordered = points.map((each) => [rank(each), each]).sort((a, b) => a[0] - b[0]);
  for (const [level, each] of ordered) {
    each.left = indent[0] + (each.x - view.x) * view.zoom * side;
    each.top = indent[1] + (1 - each.y - view.y) * view.zoom * side;
    context.globalAlpha = isLit(each) ? 1 : 0.12;
    Object.assign(context, { fillStyle: colours.get(each.label) ?? "#888", strokeStyle: text, lineWidth: level + 1 });
    context.fill(circle(each, level ? 6 : 4));
    context.globalAlpha = 1;
    if (level || each === cursor) context.stroke(circle(each, [9, 7, 11][level]));
  }
  context.setLineDash([5, 4]);
  if (lasso) context.stroke(lasso);
  placeOwn(width, height);
}

/** Mark a query that is no point, at the mean of its nearest hits' places, weighted by similarity. */
function placeOwn(width, height) {
  const weight = (image) => Math.max(1e-6, marks.hits.get(keyOf(image)));
  const isOwn = marks.query !== null && !points.some((each) => keyOf(each) === marks.query);
  const hits = isOwn ? points.filter((each) => marks.hits.has(keyOf(each))) : [];
  const near = hits.sort((a, b) => weight(b) - weight(a)).slice(0, NEAREST);
  const sum = (value) => near.reduce((total, each) => total + weight(each) * value(each), 0);
  const [left, top] = ["left", "top"].map((side) => sum((each) => each[side]) / sum(() => 1));
  $("map-query").hidden = !(left >= 0 && left <= width && top >= 0 && top <= height); // also without a hit
  Object.assign($("map-query").style, { left: `${left}px`, top: `${top}px` });
}

/** Painted in this order: others, hits, query. */
const rank = (image) => (keyOf(image) === marks.query ? 2 : marks.hits.has(keyOf(image)) ? 1 : 0);

function circle({ left, top }, radius) {
  const path = new Path2D();
  path.arc(left, top, radius, 0, 2 * Math.PI);
  return path;
}

function nearest(left, top, within) {
  let best = null;
  let least = within;
  for (const each of points) {
    const distance = Math.hypot(each.left - left, each.top - top);
    if (distance < least) [best, least] = [each, distance];
  }
  return best;
}

function point(image) {
  cursor = image;
  $("tip").hidden = !image;
  if (image) {
    const [picture, caption] = $("tip").children;
    picture.src = thumbnail(image);
    caption.textContent = [image.label, image.name].filter(Boolean).join(", ");
    $("map-point").textContent = caption.textContent;
    const { clientWidth: width, clientHeight: height } = canvas();
    const [isRight, isLow] = [image.left > width / 2, image.top > height / 2];
    Object.assign($("tip").style, {
      left: isRight ? "auto" : `${image.left + 14}px`, right: isRight ? `${width - image.left + 14}px` : "auto",
      top: isLow ? "auto" : `${image.top + 14}px`, bottom: isLow ? `${height - image.top + 14}px` : "auto",
    });
  }
  draw();
}

/** Zoom by a factor around a place of the canvas, by default its centre; 0: the whole map. */
function zoom(factor, left = canvas().clientWidth / 2, top = canvas().clientHeight / 2) {
  const side = Math.min(canvas().clientWidth, canvas().clientHeight);
  const larger = Math.max(WHOLE.zoom, Math.min(60, view.zoom * factor));
  const [x, y] = [left - (canvas().clientWidth - side) / 2, top - (canvas().clientHeight - side) / 2];
  const by = 1 / (view.zoom * side) - 1 / (larger * side);
  view = factor ? { x: view.x + x * by, y: view.y + y * by, zoom: larger } : { ...WHOLE };
  point(null);
}

function pan(across, down) {
  const scale = view.zoom * Math.min(canvas().clientWidth, canvas().clientHeight);
  view = { ...view, x: view.x - across / scale, y: view.y - down / scale };
  point(null);
}

function press(start) {
  canvas().setPointerCapture(start.pointerId);
  fingers.set(start.pointerId, [start.offsetX, start.offsetY]);
  isMoved = fingers.size > 1; // two fingers pan and zoom, and never choose
  lasso = !isMoved && ($("lasso").ariaPressed === "true" || start.shiftKey) ? new Path2D() : null;
  point(null);
}

/** Middle of the pointers that are down, and their mean distance from it. */
function spread() {
  const all = [...fingers.values()];
  const mean = (value) => all.reduce((total, each) => total + value(each), 0) / all.length;
  const middle = [mean(([left]) => left), mean(([, top]) => top)];
  return [...middle, mean((each) => Math.hypot(each[0] - middle[0], each[1] - middle[1]))];
}

function drag(event) {
  if (!fingers.has(event.pointerId)) return hover(event);
  const [left, top, wide] = spread();
  isMoved ||= Math.hypot(event.offsetX - left, event.offsetY - top) > 4;
  if (lasso) lasso.lineTo(event.offsetX, event.offsetY);
  if (!lasso && !isMoved) return; // a click
  fingers.set(event.pointerId, [event.offsetX, event.offsetY]);
  if (lasso) return draw();
  const [toLeft, toTop, wider] = spread();
  pan(toLeft - left, toTop - top);
  if (wide && wider) zoom(wider / wide, toLeft, toTop);
}

function release(event) {
  if (!fingers.delete(event.pointerId)) return; // it was pressed elsewhere
  const found = nearest(event.offsetX, event.offsetY, 20);
  if (lasso) chooseInside();
  else if (!isMoved && found) handlers.search(found);
}

function chooseInside() {
  const context = canvas().getContext("2d");
  context.resetTransform();
  const path = lasso;
  lasso = null;
  handlers.choose(points.filter((each) => isLit(each) && context.isPointInPath(path, each.left, each.top)));
  draw();
}

function hover(event) {
  const found = nearest(event.offsetX, event.offsetY, 20);
  if (found !== cursor) point(found);
}

/** From image to image: the nearest in the arrow's direction, preferably straight ahead. */
function move([across, down]) {
  const from = cursor ?? { left: canvas().clientWidth / 2, top: canvas().clientHeight / 2 };
  let best = cursor;
  let least = Infinity;
  for (const each of points) {
    const ahead = (each.left - from.left) * across + (each.top - from.top) * down;
    const aside = Math.abs((each.left - from.left) * down) + Math.abs((each.top - from.top) * across);
    if (each !== cursor && ahead > 0 && aside <= ahead && ahead + 2 * aside < least) [best, least] = [each, ahead + 2 * aside];
  }
  point(best);
}

function pressKey(event) {
  if (event.key in DIRECTIONS) move(DIRECTIONS[event.key]);
  else if (event.key === "Enter" && cursor) handlers.search(cursor);
  else if (event.key === " " && cursor) select([cursor], !selection.has(keyOf(cursor)));
  else if (event.key === "+" || event.key === "-") zoom(event.key === "+" ? 1.5 : 1 / 1.5);
  else if (event.key === "Escape") point(null);
  else return;
  event.preventDefault();
}

export function startMap() {
  canvas().onpointerdown = press;
  canvas().onpointermove = drag;
  canvas().onpointerup = canvas().onpointercancel = release;
  canvas().onpointerleave = () => point(null);
  canvas().onkeydown = pressKey;
  canvas().addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(Math.exp(-event.deltaY / 400), event.offsetX, event.offsetY);
  }, { passive: false });
  for (const button of document.querySelectorAll("[data-zoom]")) button.onclick = () => zoom(Number(button.dataset.zoom));
  $("lasso").onclick = () => {
    $("lasso").ariaPressed = String($("lasso").ariaPressed !== "true");
    $("plot").classList.toggle("lasso", $("lasso").ariaPressed === "true");
  };
  new ResizeObserver(draw).observe(canvas());
}
