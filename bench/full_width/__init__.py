"""One MoE layer at K2's width: a step, and packing."""
