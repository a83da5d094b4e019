"""Measurements with a real server. Each module is a program: ``python -m bench.backlog --help``."""
