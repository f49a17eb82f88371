"""Run the command `unheard` as `python -m unheard`.

torchrun needs this form: `torchrun --nproc-per-node 8 -m unheard train ...`.
"""

from unheard.cli.main import main

if __name__ == "__main__":
    main()
