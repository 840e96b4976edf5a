"""A contest on one card: the least seconds to a loss. README.md in this folder has the rules."""
