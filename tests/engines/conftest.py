"""Engines for several machines: `make test-engines` installs them; elsewhere these tests are left out."""
