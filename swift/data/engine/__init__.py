"""The data engine: recipes of operators over documents; shard by shard, restartable, every drop in a ledger."""
