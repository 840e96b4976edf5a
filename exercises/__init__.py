"""Exercises about Triton kernels and about finding what makes a training step slow."""
