"""Programs that time training steps and kernels. Their results are in results/; pages/ writes them into pages."""
