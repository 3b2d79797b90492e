import sys

from sparse_attn.runtime.cli import main

sys.exit(main())
