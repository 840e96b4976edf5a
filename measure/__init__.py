"""What the programs share: the gradient rule, clocks, counts of work, results, tables, pictures, the command line."""
