"""Which examples a step trains on: order, mixing, packing, streaming, and the few numbers that resume it exactly."""
