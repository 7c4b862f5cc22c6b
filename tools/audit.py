"""Look for dangerous calls (bandit) and for published advisories of what is installed (pip-audit).

    python tools/audit.py

Exits 1 for a finding of medium severity or an advisory. Packages that the registry knows no advisories of were not
audited: pip-audit calls that success, so their number is printed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 600


def code() -> int:
    """Bandit over the package, medium severity and above; lines that are right say why after ``nosec``."""
    return subprocess.run(
        [sys.executable, "-m", "bandit", "-q", "-r", "fedcache", "-ll"], cwd=ROOT, check=False
    ).returncode


def packages() -> int:
    """pip-audit over this environment: 1 when an advisory fits."""
    line = [sys.executable, "-m", "pip_audit", "--local", "-f", "json", "--progress-spinner", "off"]
    try:
        done = subprocess.run(
            line, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        found = json.loads(done.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, ValueError, KeyError) as error:
        print(
            f"pip-audit: nothing was audited, no advisories can be had here ({type(error).__name__})."
        )
        return 0
    audited = [p for p in found if "skip_reason" not in p]
    hit = [p for p in audited if p["vulns"]]
    for package in hit:
        for advisory in package["vulns"]:
            fixed = ", ".join(advisory["fix_versions"]) or "no release"
            print(f"{package['name']} {package['version']}: {advisory['id']}, fixed in {fixed}")
    print(
        f"pip-audit: {len(audited)} of {len(found)} packages audited, {len(hit)} with advisories."
    )
    return int(bool(hit))


if __name__ == "__main__":
    wrong = code()
    print("bandit: nothing of medium or high severity." if wrong == 0 else "bandit: see above.")
    sys.exit(1 if wrong or packages() else 0)
