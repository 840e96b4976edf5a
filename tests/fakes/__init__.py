"""Fakes of the ROCm profilers, and the records that they write."""
