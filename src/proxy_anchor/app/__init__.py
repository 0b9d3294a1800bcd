"""The local search page."""
