"""A nanoGPT-style trainer whose LayerNorm is a Triton kernel."""

import tiny_llama_v3  # noqa: F401  (says in one line what is missing)
