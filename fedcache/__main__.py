"""``python -m fedcache``."""

from fedcache.cli import main

if __name__ == "__main__":
    main()
