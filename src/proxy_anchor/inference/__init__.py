"""A trained network in use: checkpoint, embedder, index, retriever, export, search page."""
