"""How a model is run, chosen by measuring: fast enough, good enough, and no less exact than that takes.

`candidates` names the ways, `measure` times them, `gate` tells what quality they cost, `choose` decides, `store` keeps
the decision for the next start, `adapt` does all of it for a model that is about to be loaded.
"""
