"""`python -m trl_packfix`: the command line."""

import sys

from .cli import main

sys.exit(main())
