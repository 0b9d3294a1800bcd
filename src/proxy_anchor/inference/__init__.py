"""Use of a trained network: checkpoint, embedder, index, retriever, export, page."""
