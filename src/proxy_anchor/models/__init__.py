"""Embedding networks: a timm backbone, pooling, one linear layer, unit length."""
