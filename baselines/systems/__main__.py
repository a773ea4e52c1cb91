"""`python -m baselines.systems CASE.json` under torchrun: run another system on our workload."""

import sys

from baselines.systems.worker import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
