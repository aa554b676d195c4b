"""Floor 0: errors, logging, registry, devices, files. Imports no torch at module level."""
