"""Frozen values without behaviour beyond validation."""
