"""Exact search by cosine similarity, and the metrics computed from it."""
