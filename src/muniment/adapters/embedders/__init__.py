"""Models and what makes parts of a text, one module a kind of embedder (ADR 0011)."""
