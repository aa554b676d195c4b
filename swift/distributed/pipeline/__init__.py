"""Pipelines: a model whose layers lie on several processes, and the order in which micro-batches run through them."""
