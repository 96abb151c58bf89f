"""`python -m bench`, which is the same program as `python -m ddp_scaling_bench`."""

from ddp_scaling_bench.__main__ import main

if __name__ == "__main__":
    main()
