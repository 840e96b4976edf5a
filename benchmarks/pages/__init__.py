"""Writes results into the pages, as tables, sentences and pictures."""
