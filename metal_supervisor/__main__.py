"""`python -m metal_supervisor` is the same command as `metal-supervisor`."""

import gc
import sys


def start() -> int:
    """Run the command line; return its exit code: 130 for a Ctrl-C, while its modules are still imported, too."""
    # Modules stay, so that to search them for garbage while they are loaded only takes time: a sixth of each start.
    gc.disable()
    try:
        from metal_supervisor.cli.main import main

        return main()
    except KeyboardInterrupt:
        return 130
    finally:
        gc.freeze()  # nor need the interpreter search them once more to end


if __name__ == "__main__":
    sys.exit(start())
