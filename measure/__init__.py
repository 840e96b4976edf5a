"""What everything that measures shares: the gradient rule, clocks, counts of work, results, tables."""
