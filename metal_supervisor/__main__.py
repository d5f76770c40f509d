"""`python -m metal_supervisor` is the same command as `metal-supervisor`."""

import sys

from metal_supervisor.cli import main

sys.exit(main())
