"""The training loop: LightningModule, parameter groups, warm-up, the recall callback."""
