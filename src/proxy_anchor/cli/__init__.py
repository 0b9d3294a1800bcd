"""Hydra's side: configuration, checks, one-line errors. The only room that sees the config."""
