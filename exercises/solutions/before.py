"""The answers to exercises/before.py."""

A, B, C, D, E, F = "launches", "scale", "clock", "race", "gradient", "layout"
