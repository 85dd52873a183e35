"""`trl-packfix recipes`: list and print the config files for `trl-packfix train` that come with the package."""

import argparse
import json
from pathlib import Path

import yaml

from .flags import HelpFormatter, Subparsers, did_you_mean

FOLDER = Path(__file__).with_name("recipe_files")


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of `recipes` and its flags."""
    parser = subparsers.add_parser(
        "recipes",
        help="list the config files that come with the package, or print one",
        description="Without a name: what there is. With a name: print this file, for `trl-packfix train --config`. "
        "None of them was run on a GPU yet. Exit code 2: there is no recipe of this name.",
        formatter_class=HelpFormatter,
        epilog="examples: trl-packfix recipes, trl-packfix recipes qwen3-8b-lora > my.yaml",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="the recipe to print")
    parser.add_argument("--json", action="store_true", help="print titles, or the settings of the recipe, as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the list of recipes, or one recipe. Return 0."""
    if args.json:
        result = recipe_titles() if args.name is None else yaml.safe_load(read_recipe(args.name))
        print(json.dumps(result, indent=2))
    elif args.name is None:
        width = max(map(len, recipe_names()))
        print(*(f"{name:<{width}}  {title}" for name, title in recipe_titles().items()), sep="\n")
    else:
        print(read_recipe(args.name), end="")
    return 0


def recipe_names() -> list[str]:
    """Return the names of all recipes, sorted."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def recipe_titles() -> dict[str, str]:
    """Return by name the title of each recipe: the comment in its first line."""
    return {name: read_recipe(name).splitlines()[0].removeprefix("# ") for name in recipe_names()}


def read_recipe(name: str) -> str:
    """Return the text of a recipe; raise ValueError if there is no recipe of this name."""
    if name not in recipe_names():
        raise ValueError(
            f"`recipes {name}` was given. There is no recipe of this name{did_you_mean([name], recipe_names())}. "
            "Set it to one that `trl-packfix recipes` lists."
        )
    return (FOLDER / f"{name}.yaml").read_text()
