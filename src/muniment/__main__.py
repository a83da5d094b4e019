"""``python -m muniment`` and the ``muniment`` command."""

import sys


def main() -> int:
    """Run the command line and return its exit code (``muniment.cli.exits``)."""
    from muniment.cli.main import run

    return run()


if __name__ == "__main__":
    sys.exit(main())
