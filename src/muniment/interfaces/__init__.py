"""How callers reach the service: HTTP now."""
