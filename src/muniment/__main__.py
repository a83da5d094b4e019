"""``python -m muniment`` and the ``muniment`` command."""

import sys


def main() -> int:
    """Run the command line and return its exit code (``muniment.cli.exits``)."""
    try:
        from muniment.cli.main import run

        return run()
    except KeyboardInterrupt:  # Before a command began, or while one was ending.
        return 130


if __name__ == "__main__":
    sys.exit(main())
