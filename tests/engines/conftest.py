"""Engines for several machines: `make test-engines` installs them; elsewhere these tests are left out."""

from __future__ import annotations
