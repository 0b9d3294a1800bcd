"""Embedding networks: a timm backbone, pooling, one linear layer, unit length.

Importing the package registers with timm the networks that it lacks; add a new one to the import.
"""

from proxy_anchor.models import bninception, googlenet  # noqa: F401
