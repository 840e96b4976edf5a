"""Compile every kernel for GPUs that need not be in this machine, checks it, and runs it in emulation."""
