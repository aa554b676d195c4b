"""Context parallelism: ranks that share every sequence. How batches are cut, and how shared sequences attend."""
