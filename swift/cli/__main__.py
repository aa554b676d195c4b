"""`python -m swift.cli`, which also makes `torchrun -m swift.cli sft ...` work."""

import sys

from swift.cli import main

if __name__ == "__main__":
    sys.exit(main())
