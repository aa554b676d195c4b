"""What the deduplication operators are made of: hashes, sorted runs on disk, connected components, suffix arrays."""
