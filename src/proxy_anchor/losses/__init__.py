"""Losses: modules called as `loss(embeddings, labels)` that return a scalar."""
