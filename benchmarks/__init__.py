"""Programs that time training steps and kernels, and the one that writes their results into the pages."""
