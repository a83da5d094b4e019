"""Protocols only: what the stages need from the outside world."""
