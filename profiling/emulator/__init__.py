"""Runs the kernels, compiled for an AMD GPU that is not there, instruction by instruction on this CPU.

The instructions are tinygrad's (MIT licence): under test/ it has an emulator of AMD's CDNA instruction set, which
source.py finds or fetches and patches. machine.py is the compute unit around them, driver.py the driver that Triton
compiles and launches with, counts.py what can be counted on the way. `make emulate` runs the tests on it.
"""
