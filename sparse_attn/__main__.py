import sys

from sparse_attn.cli.main import main

sys.exit(main())
