"""Tables and streams are sources of one interface, and one place chooses between them."""

import ast
from pathlib import Path

import trl_packfix

TRAINING = Path(trl_packfix.__file__).parent / "training"
# Where the class of a dataset is looked at: the choice of the source; settings that a stream does not have; the
# evaluation, where a stream becomes a table; and `check_data`, which refuses what is neither of the two
ASKS = {
    ("loading", "source_class"),
    ("choices", "is_stream"),
    ("evaluation", "make_loader"),
    ("preparation", "check_data"),
}


def places_that_ask(text: str, module: str) -> set[tuple[str, str]]:
    """Return the functions of a module that compare the class of an object with `IterableDataset`."""
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    places = set()
    for function in functions:
        calls = [ast.unparse(node) for node in ast.walk(function) if isinstance(node, ast.Call)]
        if any(call.startswith("isinstance(") and "IterableDataset" in call for call in calls):
            places.add((module, function.name))
    return places


def test_the_trainer_asks_in_one_place_whether_its_training_set_is_a_stream():
    places = set()
    for path in TRAINING.glob("*.py"):
        places |= places_that_ask(path.read_text(), path.stem)
    assert places == ASKS
