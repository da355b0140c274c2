"""Prints the requirements of pyproject.toml's extras, and of extras they name, one a line.

Usage: extras.py EXTRA...
"""

import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extras, requirements = sys.argv[1:], set()
for extra in extras:
    for requirement in project["optional-dependencies"][extra]:
        own = re.fullmatch(rf"{project['name']}\[(.*)\]", requirement)
        if own is None:
            requirements.add(requirement)
        else:
            extras += [name for name in own[1].split(",") if name not in extras]
print("\n".join(sorted(requirements)))
