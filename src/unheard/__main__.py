"""`python -m unheard` is `unheard`: the form that torchrun starts (`torchrun --nproc-per-node 8 -m unheard train ...`)."""

from unheard.cli.main import main

if __name__ == "__main__":
    main()
