"""Compiles every kernel for GPUs that need not be in this machine, and checks and reports the result."""
