"""Devices: where the active set lives and selection happens."""
