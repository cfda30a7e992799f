"""`python -m forerun` is the command `forerun`."""

import sys

from forerun.cli.main import main

sys.exit(main())
