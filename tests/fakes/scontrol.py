"""scontrol show hostnames: the names in a list of nodes, one a line. "localhost,localhost" are two nodes here."""

import sys

if sys.argv[1:3] != ["show", "hostnames"] or len(sys.argv) != 4:
    sys.exit(f"invalid keyword: {' '.join(sys.argv[1:])}")
print(*sys.argv[3].split(","), sep="\n")
