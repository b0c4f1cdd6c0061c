"""`python -m harness` and the command `harness`."""

import sys
import traceback


def main() -> None:
    """Run the command; an installation that cannot be imported is not exit 1, a NO-GO."""
    try:
        from harness.cli.main import main as command
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(3)
    except Exception:  # noqa: BLE001 - shown whole
        traceback.print_exc()
        sys.stderr.write("error: the harness cannot be imported\n  Install it again with pip.\n")
        sys.exit(4)
    command()


if __name__ == "__main__":
    main()
