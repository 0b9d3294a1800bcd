"""Train with the parts of my_parts.py."""

import my_parts  # noqa: F401  (registers the backbone)

from proxy_anchor.cli import main as entry
from train import main

if __name__ == "__main__":
    entry.run(main, "train")
