"""Runs the kernels, compiled for an AMD GPU that is not there, instruction by instruction on this CPU.

The instructions are tinygrad's (MIT licence): under test/ it has an emulator of AMD's CDNA instruction set, which
source.py finds or fetches and patches. machine.py is the compute unit around them, driver.py the driver that Triton
compiles and launches with, counting.py a machine that counts, and counts.py what it counts and the report. `make
emulate` runs the tests on it.
"""
