"""`python -m nofm` is `nofm`."""

from .cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
