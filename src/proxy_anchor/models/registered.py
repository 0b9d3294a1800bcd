"""Networks that timm lacks: importing this file registers them with timm. One more is written beside them and named here."""

from proxy_anchor.models import bninception, googlenet  # noqa: F401  (importing them is the registration)
