"""Callbacks: recall, checkpoints, health, memory, start-up, progress."""
