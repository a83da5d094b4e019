"""Concrete sides of the ports. Only ``wiring`` and ``executor_wiring`` name them."""
