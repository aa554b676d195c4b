"""Tokens on disk: shards that are written as they come and mapped when they are read, and what proves them fit."""
