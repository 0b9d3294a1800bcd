"""Registers the networks that timm lacks; a new one is added to the import below."""

from proxy_anchor.models import bninception, googlenet  # noqa: F401  (the import registers them)
