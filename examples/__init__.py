"""Our model and kernels beside those of others. Start a program from the root: `python -m examples.hf_weights`."""
