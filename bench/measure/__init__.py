"""What ``bench.targets`` and ``bench.mixed`` are made of: loads, limits, and the arithmetic of ratios."""
