"""Emulates an AMD GPU: runs kernels that were compiled for it, instruction by instruction, on this CPU.

tinygrad (MIT licence) has an emulator of AMD's CDNA instruction set under test/, which source.py finds or fetches, and
patches. machine.py emulates the compute unit around the instructions, and memory_system.py models its cache lines and
banks. driver.py is the driver with which Triton compiles and launches. counting.py is a machine that counts, counts.py
holds what it counts, and report.py writes the page. `make emulate` runs the tests of the kernels on it.
"""
