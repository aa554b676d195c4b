"""Floor 2: finding and loading models, adapters on any module, freezing, merging."""
