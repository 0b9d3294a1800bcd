"""The default data set `glyphs`: characters drawn with the fonts of matplotlib.

A class is a character. An image shows it in one of 12 faces with random pose, colours, background, clutter and noise.
Training and searched classes are disjoint, as in every benchmark. Nothing is downloaded: the images are drawn on first
use and stored as PNG files.
"""

from __future__ import annotations

import os
import unicodedata
import uuid
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

from proxy_anchor.data.table import Splits, make_splits, missing_or_empty
from proxy_anchor.errors import UsageError, check_int

# Part of the folder name: increase it with every change of the images.
FORMAT_VERSION = 1

FACES = tuple(
    f"DejaVu{family}{style}.ttf"
    for family, slanted in (("Sans", "Oblique"), ("SansMono", "Oblique"), ("Serif", "Italic"))
    for style in ("", "-Bold", f"-{slanted}", f"-Bold{slanted}")
)

# Characters that all 12 faces have and of which no two look alike in any face, at any size and rotation of the pose
# range (Latin A, Greek Alpha and Cyrillic A are one shape: only the first is here). tests/data/test_glyphs.py
# measures all pairs.
CHARACTERS = (
    "012345679ACEFGHKLPRTUVWXYZbdefkmnqrtÆÞþħŁłŊŒŦƁƆƈƋƒƔƕƛƜƝƣƦƩƪƫƮƴƶƸƺƾǂǶȤȴȵȶȸȹȻȽȾȿɀɁɃɄɍɖɚɠɬɮɲɴɸɹɺɻɾʁʆʇʍʎʐʑʞʢʤʦʧʩʫʭʮ"
    "ΞΨαβζιλμνξςτωϗϞϡϻϾϿЂЉЋЏЖЛЧЩЪмяђњћѢҐҗҘҚңҤҭҳҺӄӋӶԴԶԷԸԻԾԿՀՃՆՊՌՎՐՒՖխջֆეკლორქღჱჴᴂᴖᴗᴝᴞᵻⱵ"
    "#$%&+<>@¢£¤¥§¬±¶€₯₸₹∆∋∓∗√∛∝∞∟∫∸∹≂≃≐≒≓≡≤≥⊂⊆⊇⊐⊓⊔⊕⊙⊟⊠⊢⊣⋄⌂⌐⌑⌘⌙⌥⌨☀☸☹☼☿♀♁♂♃♅♆♇♠♡♢♤♧♪♫♬♭♯"
)

MAX_ROTATION_DEG = 12.0  # in either direction
MAX_SHEAR = 0.15
EXTENT = (0.5, 0.72)  # longer side of the upright character, as a share of the image side
MAX_SHIFT = 0.1  # of the image side
# Grey levels of 255; the last three are standard deviations. Contrast is between the means of ground and ink.
GROUND_LEVELS, MIN_CONTRAST = (110.0, 255.0), 70.0
GROUND_TEXTURE, INK_TEXTURE, NOISE = 25.0, 12.0, (2.0, 12.0)
CLUTTER = (1, 3)  # lines and arcs in an image
FONT_PX = 64  # size at which characters are drawn before they are resampled to their pose
GREY = np.array([0.299, 0.587, 0.114])


def load_glyphs(
    root: Path | str,
    *,
    seed: int = 0,
    train_classes: int = 120,
    test_classes: int = 120,
    images_per_class: int = 24,
    image_size: int = 48,
    verify_files: bool = True,
) -> Splits:
    """Load the glyphs from `root`; missing or empty images are drawn.

    Drawing takes seconds, on first use. The splits are class-disjoint, without gallery.
    seed: of the characters of each split and of all poses; the pixels of an image depend on nothing else.
    images_per_class: at least 2. image_size: side in pixels, at least 24. verify_files: has no effect; other loaders
    have it too.
    Raises UsageError for a number out of range, too many classes, or a `root` that cannot be written.
    """
    check_int("seed", seed, 0)
    check_int("train_classes", train_classes, 1)
    check_int("test_classes", test_classes, 1)
    check_int("images_per_class", images_per_class, 2)
    check_int("image_size", image_size, 24)
    if train_classes + test_classes > len(CHARACTERS):
        raise UsageError(
            f"train_classes={train_classes} and test_classes={test_classes}: glyphs has {len(CHARACTERS)} characters "
            f"for both together; ask for fewer."
        )
    folder = Path(root) / (
        f"glyphs-v{FORMAT_VERSION}-seed{seed}-{train_classes}+{test_classes}classes-{images_per_class}x{image_size}px"
    )
    order = [CHARACTERS[i] for i in np.random.default_rng(seed).permutation(len(CHARACTERS))]
    rows: dict[str, list[tuple[Path, str]]] = {"train": [], "test": []}
    files: dict[Path, tuple[str, int]] = {}
    for number, character in enumerate(order[: train_classes + test_classes]):
        part, name = "train" if number < train_classes else "test", class_name(character)
        for index in range(images_per_class):
            path = folder / part / name / f"{index:03d}.png"
            rows[part].append((path, name))
            files[path] = (character, index)
    if missing := missing_or_empty(files):
        _draw_missing({path: files[path] for path in missing}, seed=seed, image_size=image_size)
    return make_splits("glyphs", rows["train"], rows["test"])


def class_name(character: str) -> str:
    """Folder name of a character in ASCII: 'u0416_cyrillic_capital_letter_zhe'."""
    readable = unicodedata.name(character).lower().replace(" ", "_").replace("-", "_")
    return f"u{ord(character):04x}_{readable}"


def draw_glyph(character: str, index: int, *, seed: int = 0, image_size: int = 48) -> Image.Image:
    """Draw image number `index` of a character: RGB, `image_size` pixels square."""
    rng = np.random.default_rng([seed, ord(character), index])
    # A small grid of random colours, enlarged, gives gradient and texture. The ink is darker than the ground.
    ground_colour = rng.uniform(*GROUND_LEVELS, 3)
    ground = _field(ground_colour + rng.normal(0, GROUND_TEXTURE, (4, 4, 3)), image_size)
    draw = ImageDraw.Draw(ground)
    for _ in range(rng.integers(CLUTTER[0], CLUTTER[1] + 1)):
        _draw_clutter(draw, rng, image_size)
    ink_colour = rng.uniform(0, 160, 3)
    while (ground_colour - ink_colour) @ GREY < MIN_CONTRAST:
        ink_colour = rng.uniform(0, 160, 3)
    ink = _field(ink_colour + rng.normal(0, INK_TEXTURE, (2, 2, 3)), image_size)
    ground.paste(ink, mask=_posed_mask(character, FACES[rng.integers(len(FACES))], rng, image_size))
    noise = rng.standard_normal((image_size, image_size, 3), dtype=np.float32) * np.float32(rng.uniform(*NOISE))
    return Image.fromarray(np.clip(np.asarray(ground) + noise, 0, 255).astype(np.uint8))


def _field(colours: np.ndarray, size: int) -> Image.Image:
    """Enlarge a small grid of colours to a smooth image."""
    return Image.fromarray(np.clip(colours, 0, 255).astype(np.uint8)).resize((size, size), Image.Resampling.BICUBIC)


def _draw_clutter(draw: ImageDraw.ImageDraw, rng: np.random.Generator, size: int) -> None:
    """Draw one random thin line or arc."""
    x0, y0, x1, y1 = (float(value) for value in rng.uniform(-0.2, 1.2, 4) * size)
    red, green, blue = (int(value) for value in rng.integers(0, 256, 3))
    width = int(rng.integers(1, max(2, size // 16) + 1))
    if rng.random() < 0.5:
        draw.line((x0, y0, x1, y1), fill=(red, green, blue), width=width)
    else:
        start = float(rng.uniform(0, 360))
        box = (min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1))
        draw.arc(box, start, start + float(rng.uniform(60, 300)), fill=(red, green, blue), width=width)


def upright_mask(character: str, face: str) -> Image.Image:
    """Mask of a character, cropped to its ink: mode L, 255 is ink."""
    canvas = Image.new("L", (4 * FONT_PX, 3 * FONT_PX))
    ImageDraw.Draw(canvas).text((FONT_PX, FONT_PX // 2), character, font=_font(face), fill=255)
    return canvas.crop(canvas.getbbox())


def _posed_mask(character: str, face: str, rng: np.random.Generator, size: int) -> Image.Image:
    """Mask of a character in a random pose: mode L, `size` pixels square."""
    mask = upright_mask(character, face)
    scale = rng.uniform(*EXTENT) * size / max(mask.size)
    angle, shear = np.radians(rng.uniform(-MAX_ROTATION_DEG, MAX_ROTATION_DEG)), rng.uniform(-MAX_SHEAR, MAX_SHEAR)
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    inverse = np.linalg.inv(scale * rotation @ np.array([[1, shear], [0, 1]]))  # PIL maps output to input
    centre_out = size * (0.5 + rng.uniform(-MAX_SHIFT, MAX_SHIFT, 2))
    offset = np.array(mask.size) / 2 - inverse @ centre_out
    (a, b), (d, e) = inverse
    data = (a, b, offset[0], d, e, offset[1])
    return mask.transform((size, size), Image.Transform.AFFINE, data, Image.Resampling.BILINEAR)


@cache
def _font(face: str) -> ImageFont.FreeTypeFont:
    import matplotlib  # imported here, because it is slow and only needed for drawing

    # BASIC, because the other layout engine is not in every build of Pillow.
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / face
    return ImageFont.truetype(path, FONT_PX, layout_engine=ImageFont.Layout.BASIC)


def _draw_missing(files: dict[Path, tuple[str, int]], *, seed: int, image_size: int) -> None:
    """Draw images, {path: (character, index)}, in this process: about 0.6 ms each.

    Each file is written under a temporary name and renamed. An interrupted run is continued, and two processes that
    draw at once write the same bytes.
    """
    bar = tqdm(files.items(), desc="drawing glyphs", unit=" images", leave=False, disable=None)
    try:
        for path, (character, index) in bar:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
            image = draw_glyph(character, index, seed=seed, image_size=image_size)
            image.save(temporary, format="PNG", compress_level=1)
            os.replace(temporary, path)
    except OSError as error:
        raise UsageError(
            f"glyphs cannot be drawn or written ({error}): choose another folder, or free space."
        ) from None
