"""Companions of tiny_llama_v3.py: what only some runs need. Each imports the script and nothing else of the project."""
