"""Pure decisions: values in, values out; no I/O, clock or randomness."""
