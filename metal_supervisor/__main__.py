"""`python -m metal_supervisor` is the same command as `metal-supervisor`."""

import sys

try:
    from metal_supervisor.cli.main import main

    code = main()
except KeyboardInterrupt:  # while still importing, too
    code = 130
sys.exit(code)
