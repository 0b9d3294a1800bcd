// The visitor's own pictures (chosen, dropped or pasted), and the box on a query.

import { $, element } from "./grid.js";

export const uploads = new Map(); // "uN": { file, url }

/** Keep the usable files: { added: their keys, complaint: about the last of the others }. */
export function keep(files, maxBytes) {
  const added = [];
  let complaint = "";
  for (const file of files) {
    // Checked here too, so that a wrong file is answered at once and not sent.
    if (!file.type.startsWith("image/")) complaint = `${file.name} is not an image.`;
    else if (file.size > maxBytes) {
      complaint = `${file.name} is larger than ${Number((maxBytes / 2 ** 20).toPrecision(3))} MB.`;
    } else {
      added.push(`u${uploads.size + 1}`);
      uploads.set(added.at(-1), { file, url: URL.createObjectURL(file) });
    }
  }
  return { added, complaint };
}

export function startFiles(take) {
  $("file").onchange = () => {
    take([...$("file").files]);
    $("file").value = ""; // so that the same file can be chosen again
  };
  document.addEventListener("paste", (event) => {
    if (event.clipboardData.files.length) take([...event.clipboardData.files]);
  });
  for (const name of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(name, (event) => {
      event.preventDefault();
      // Between two elements of the page the pointer "leaves" with a relatedTarget.
      document.body.classList.toggle("over", name === "dragover" || (name === "dragleave" && event.relatedTarget !== null));
      if (name === "drop" && event.dataTransfer.files.length) take([...event.dataTransfer.files]);
    });
  }
}

/** box: "x,y,width,height" as shares of the picture, or "". */
export function showBox(box) {
  $("box").hidden = !box;
  const parts = box.split(",");
  ["left", "top", "width", "height"].forEach((side, place) => { $("box").style[side] = `${100 * parts[place]}%`; });
}

/** Drawing with the pointer; choose(box) when it is done, choose(null) for none. */
export function startBox(choose) {
  const stage = $("stage");
  const share = (event) => {
    const { left, top, width, height } = stage.getBoundingClientRect();
    return [(event.clientX - left) / width, (event.clientY - top) / height].map((each) => Math.max(0, Math.min(1, each)));
  };
  stage.onpointerdown = (start) => {
    stage.setPointerCapture(start.pointerId);
    const from = share(start);
    let box = [0, 0, 0, 0];
    stage.onpointermove = (event) => {
      const to = share(event);
      const low = from.map((each, side) => Math.min(each, to[side]));
      box = [...low, ...from.map((each, side) => Math.abs(each - to[side]))];
      showBox(box.join());
    };
    stage.onpointerup = stage.onpointercancel = () => {
      stage.onpointermove = stage.onpointerup = stage.onpointercancel = null;
      choose(Math.min(box[2], box[3]) > 0.03 ? box.map((each) => each.toFixed(3)).join() : null);
    };
  };
}

/** The part of an image file in a box, as a JPEG file. */
export async function cut(file, box) {
  const [x, y, width, height] = box.split(",").map(Number);
  const image = await createImageBitmap(file);
  const size = [width * image.width, height * image.height].map((each) => Math.max(1, Math.round(each)));
  const canvas = element("canvas", { width: size[0], height: size[1] });
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff"; // behind transparent pixels, as the server does
  context.fillRect(0, 0, ...size);
  context.drawImage(image, x * image.width, y * image.height, ...size, 0, 0, ...size);
  return new Promise((done) => { canvas.toBlob(done, "image/jpeg", 0.95); });
}
