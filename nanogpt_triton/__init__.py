"""A nanoGPT-style trainer whose LayerNorm is a Triton kernel."""
