"""Lightning's strategy for several cards, with gradients that stay on the stream which computed them."""

from __future__ import annotations

from pytorch_lightning import LightningModule
from pytorch_lightning.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel


class OneStreamDDP(DDPStrategy):
    """Lightning wraps the network on a stream made for that, which torch takes for the one where gradients are summed: every
    parameter would make training's stream and that one wait for each other in each step, and torch warns of it.
    """

    def _setup_model(self, model: LightningModule) -> DistributedDataParallel:  # type: ignore[override]
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)
