"""Proxy-NCA++ loss: Teh et al., ECCV 2020.

"ProxyNCA++: Revisiting and Revitalizing Proxy Neighborhood Component Analysis".

Softmax over *all* proxies at a low temperature T, with d the squared distance of unit vectors, averaged over the batch:

    -log [ exp(-d(x, p+) / T) / sum over all proxies p of exp(-d(x, p) / T) ]

The paper's value: T = 1/9. Its other parts are outside of the loss: faster proxies (optimizer.proxy_lr_mult, for every
loss), global max pooling (backbone.pooling=max), layer norm before the head (not used here), and class-balanced batches
(data.images_per_class).

pytorch-metric-learning has no loss of this name. Its ProxyNCALoss with softmax_scale = 1/T is the same function
except for the hardest samples (see proxy_nca.py). Kim et al.'s released code uses it as "Proxy-NCA", with T = 1/32.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from proxy_anchor.errors import check_number
from proxy_anchor.losses.base import ProxyLoss


class ProxyNCAPlusPlusLoss(ProxyLoss):
    """Softmax over the squared distances to all proxies.

    Args:
        num_classes: C; one proxy each. embedding_dim: D.
        temperature: T, above 0.

    Attributes:
        proxies: (C, D) parameter, see `ProxyLoss`.
    """

    def __init__(self, num_classes: int, embedding_dim: int, temperature: float = 1 / 9) -> None:
        super().__init__(num_classes, embedding_dim)
        self.temperature = check_number("loss.temperature", temperature, 0, exclusive=True)

    def of_similarities(self, similarities: Tensor, labels: Tensor) -> Tensor:
        """Mean over the batch."""
        return F.cross_entropy((2 * similarities - 2) / self.temperature, labels)
