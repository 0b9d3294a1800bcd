"""Sphinx settings: `make docs` builds README.md, docs/ and notebooks/ into site/html, and fails on a broken link.

Links in the sources are those that a forge follows. Here, files that are no pages are copied beside the pages; a
folder has no page, so a link to one becomes plain text.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from sphinx.application import Sphinx

REPOSITORY = Path(__file__).resolve().parent.parent
GUIDES = ("getting_started", "data", "recipes", "losses", "evaluation", "search", "results", "speed", "scale")
GUIDES += ("reliability", "extending", "troubleshooting", "api")
NOTEBOOKS = ("quickstart", "your_own_data", "explore_retrieval", "reproduce_the_paper", "loss_anatomy")

project = "proxy_anchor"
# Markdown with MyST, notebooks with the output that they are kept with, and docstrings.
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["README.md", "docs/*.md", "notebooks/*.ipynb"]
exclude_patterns = [".*", "data", "runs", "site", "src", "tests"]
myst_heading_anchors = 3
nb_execution_mode = "off"
html_theme = "furo"
html_title = "proxy_anchor"
html_static_path, html_css_files = ["static"], ["site.css"]
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"


def _add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """The list of pages, which a forge would show as code, stands here instead of in README.md."""
    source[0] = _without_folders(source[0], (REPOSITORY / f"{name}.md").parent)
    if name == root_doc:
        for caption, folder, pages in (("Guides", "docs", GUIDES), ("Notebooks", "notebooks", NOTEBOOKS)):
            lines = "\n".join(f"{folder}/{page}" for page in pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n{lines}\n```\n"


def _without_folders(text: str, place: Path) -> str:
    return re.sub(
        r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)\)",
        lambda link: link[1] if "://" not in link[2] and (place / link[2]).is_dir() else link[0],
        text,
    )


def _add_start(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        shutil.copy(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _add_contents)
    app.connect("build-finished", _add_start)
