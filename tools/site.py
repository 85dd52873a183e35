"""A hook of mkdocs: version, licence and addresses of the site come from `pyproject.toml` and the package."""

import runpy
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def on_config(config: Any) -> Any:
    """Write the footer of all pages, and the link to the repository once `[project.urls]` has its address."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = runpy.run_path(str(ROOT / "trl_packfix" / "version.py"))["__version__"]
    config["site_name"] = f"{project['name']} {version}"
    config["site_description"] = project["description"]
    config["copyright"] = f"{project['name']} {version}, licence: {project['license']}"
    config["repo_url"] = project["urls"].get("Repository")
    config["site_url"] = project["urls"].get("Documentation")
    return config
