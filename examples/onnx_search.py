"""Search a folder with an exported model: `python examples/onnx_search.py MODEL_FOLDER GALLERY_FOLDER QUERY_FILE`.

MODEL_FOLDER: written by `python src/export.py checkpoint=... format=onnx`. Needs onnxruntime, numpy and Pillow only.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

model, gallery, query = map(Path, sys.argv[1:] if len(sys.argv) == 4 else sys.exit(__doc__))
session = onnxruntime.InferenceSession(model / "model.onnx")
images = json.loads((model / "config.json").read_text())["images"]


def embed(path: Path) -> np.ndarray:
    """Unit vector (D,) of an image: shorter side to `resize` (null: all to `crop`), central square, network."""
    image, crop, resize = ImageOps.exif_transpose(Image.open(path)).convert("RGB"), images["crop"], images["resize"]
    size = [resize * side // min(image.size) if resize else crop for side in image.size]
    left, top = (round((side - crop) / 2) for side in size)
    image = image.resize(size, Image.Resampling.BILINEAR).crop((left, top, left + crop, top + crop))
    return session.run(None, {"images": np.asarray(image).transpose(2, 0, 1)[None]})[0][0]


wanted, found = embed(query), []
for path in gallery.rglob("*"):
    if path.suffix.lower() in (".jpg", ".jpeg", ".png"):
        try:
            found.append((embed(path) @ wanted, path))
        except OSError as error:  # a damaged file
            print(f"left out: {path} ({error})", file=sys.stderr)
for similarity, path in sorted(found, reverse=True)[:5]:
    print(f"{similarity:.3f}  {path}")
