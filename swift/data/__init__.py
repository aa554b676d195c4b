"""Rows to token batches: sources, row shapes, the ledger, chat encoding, packing and the loader.

Nothing is imported here: `swift data check` must not pay for torch, and training must not pay for pyarrow.
"""
