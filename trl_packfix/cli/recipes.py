"""`trl-packfix recipes`: list and print the config files for `trl-packfix train` that come with the package."""

import argparse
import json
import re
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

import yaml

from .flags import HelpFormatter, Subparsers

FOLDER = Path(__file__).with_name("recipe_files")
WORD = r"[\w.]+"  # a word of a text: "qwen3.5-4b-lora" has the words "qwen3.5", "4b" and "lora"


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of `recipes` and its flags."""
    parser = subparsers.add_parser(
        "recipes",
        help="list the config files that come with the package, or print one",
        description="Without a name: what there is. With a name: print this file, for `trl-packfix train --config`. "
        "None of them was run on a GPU yet. Exit code 2: there is no recipe of this name; recipes like it are listed.",
        formatter_class=HelpFormatter,
        epilog="examples: trl-packfix recipes, trl-packfix recipes qwen3-8b-lora > my.yaml",
    )
    parser.add_argument("words", nargs="*", metavar="NAME", help="the recipe to print, or words to find it by")
    parser.add_argument("--json", action="store_true", help="print titles, or the settings of the recipe, as JSON")
    parser.set_defaults(run_command=run_recipes)


def run_recipes(args: argparse.Namespace) -> int:
    """Print the list of recipes, or one recipe. Return 0; `read_recipe` raises a ValueError for an unknown name."""
    name = " ".join(args.words)  # several words name no recipe, and the message lists the recipes that have them
    if args.json:
        result = yaml.safe_load(read_recipe(name)) if name else recipe_titles()
        print(json.dumps(result, indent=2))
    elif name:
        print(read_recipe(name), end="")
    else:
        print(list_recipes(recipe_names()))
    return 0


def list_recipes(names: Iterable[str]) -> str:
    """Return a line for each recipe, with its name and its title."""
    titles = recipe_titles()
    width = max(map(len, titles))
    return "\n".join(f"{name:<{width}}  {titles[name]}" for name in names)


def recipe_names() -> list[str]:
    """Return the names of all recipes, sorted."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def recipe_titles() -> dict[str, str]:
    """Return by name the title of each recipe: the comment in its first line."""
    return {name: _read_file(name).splitlines()[0].removeprefix("# ") for name in recipe_names()}


def similar_recipes(text: str) -> list[str]:
    """Return the names of recipes with each word of a text, or a similar word, in their name, title or model.

    >>> similar_recipes("lama 8b")
    ['llama-3.1-8b-lora']
    """
    words = re.findall(WORD, text.lower())
    names = []
    for name, title in recipe_titles().items():
        model = yaml.safe_load(_read_file(name)).get("model_name_or_path", "")
        words_of_recipe = re.findall(WORD, f"{name} {title} {model}".lower())
        if all(_is_similar(word, words_of_recipe) for word in words):
            names.append(name)
    return names


def _is_similar(word: str, known_words: list[str]) -> bool:
    """Return whether a word is, or is like, one of the known words or a part of it."""
    is_part = any(word in known_word for known_word in known_words)
    return is_part or bool(get_close_matches(word, known_words, cutoff=0.8))


def read_recipe(name: str) -> str:
    """Return the text of a recipe; raise ValueError, with the recipes of similar names, if no recipe has the name."""
    if name not in recipe_names():
        names = similar_recipes(name)
        advice = f"Set one of these:\n{list_recipes(names)}" if names else "Set one that `trl-packfix recipes` lists."
        raise ValueError(f"`recipes {name}` was given. There is no recipe of this name. {advice}")
    return _read_file(name)


def _read_file(name: str) -> str:
    """Return the text of the file of a recipe."""
    return (FOLDER / f"{name}.yaml").read_text()
