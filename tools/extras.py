"""Prints the requirements of pyproject.toml's extras, one a line.

Usage: extras.py EXTRA...
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
requirements = {
    requirement
    for extra in sys.argv[1:]
    for requirement in project["optional-dependencies"][extra]
    if not requirement.startswith(project["name"])
}
print("\n".join(sorted(requirements)))
