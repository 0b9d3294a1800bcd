"""Registers networks that timm lacks; add a new one to the import."""

from proxy_anchor.models import bninception, googlenet  # noqa: F401  (the import registers them)
