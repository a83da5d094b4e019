"""The supervised child process that plans and embeds: its protocol, both its sides (ADR 0010)."""
