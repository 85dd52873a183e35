"""What changes an object of another library is in `compat.py`, with its reason and its end.

A change is an assignment to an attribute, or to an entry of an attribute, of an object whose class this package does
not define; `support/assignments.py` reads from the source which class an object has. What it cannot find counts as
foreign, and is in `REVIEWED` with the reason why it may stay. Not seen are what functions of other libraries change
when they are called (registering is how they want to be extended), and tables under a name of their own, such as
`hooks = module._forward_hooks`.
"""

import ast

import pytest
from support.assignments import PackageSource
from support.features import PRESENT
from support.paths import ROOT

PACKAGE = ROOT / "trl_packfix"
SOURCE = PackageSource.from_folder(PACKAGE)
FENCE = "compat.py"

REVIEWED = {
    "objects of this package whose class the source does not name": """
        data/documents.py ledger.kept
        data/documents.py fragments.trained[changed]
        training/config.py as_field.metadata
        training/config.py setattr(config, ...)
        training/config.py vars(args).update
        training/config.py vars(config).update
        training/first_step.py unwrapped_probe.drawing_modules
        training/lm_head.py forward_with_scores.__wrapped__
        training/lm_head.py forward_with_scores.has_token_scores
        training/lm_head.py scores.aux_loss
        training/lm_head.py scores.loss
    """,
    "the trainer's own copy of the settings (`adopt_args`)": """
        training/trainer.py args.assistant_only_loss
        training/trainer.py args.liger_kernel_config
        training/trainer.py args.max_length
        training/trainer.py args.packing
        training/trainer.py args.packing_strategy
        training/trainer.py args.padding_free
    """,
    "made by the function that changes it, and given to no one else": """
        cli/forecast.py console.width
        features/images/collator.py vars(model)['config']
        data/model_costs.py config._attn_implementation
        data/model_memory.py module.__dict__
        data/model_memory.py module.cast_input_dtype_enabled
        data/model_memory.py module.forward
        data/model_memory.py setattr(module, ...)
        reporting/pictures.py figure._repr_png_
        samples/data_proof.py leaf.holder[leaf.key]
        samples/marks.py leaf.holder[leaf.key]
        features/images/processor.py processor.image_processor
        samples/rendering.py conversation.arguments.pop
        samples/rendering.py conversation.arguments.setdefault
    """,
    "public in torch, and put back at the end of the context: train mode, and the rates of dropout": """
        isolation/probe.py module.training
        isolation/probed_model.py module.training
        isolation/probed_model.py setattr(module, ...)
    """,
    "where a function of autograd keeps values for its backward": """
        attention/exchange.py ctx.group
        attention/exchange.py ctx.receive_counts
        attention/exchange.py ctx.send_counts
        attention/flash.py ctx.kernel
        training/lm_head.py ctx.dtype
        training/lm_head.py ctx.scale
        training/lm_head.py ctx.softcap
    """,
    "results and states that transformers gives to callbacks and overrides so that they change them": """
        features/pack_forward/trainers.py state.log_history[-1]
        training/evaluation.py output.metrics.pop
        training/evaluation.py output.metrics[f'{prefix}_{name}']
        training/evaluation.py output.metrics[f'{prefix}_loss']
        training/objective.py outputs.aux_loss
        training/objective.py self._trainer.state.num_input_tokens_seen
        training/trainer.py self.control.should_training_stop
    """,
    "public, and set as TRL sets it on the tokenizer or the config that it is given": """
        training/preparation.py processing_class.chat_template
        training/preparation.py tokenizer.eos_token
        training/preparation.py tokenizer.pad_token
        training/routers.py config.output_router_logits
    """,
    "of the command line: its environment, its parser and what it has parsed": """
        cli/__init__.py args.unparsed_words
        cli/configs.py os.environ['ACCELERATE_DEEPSPEED_CONFIG_FILE']
        cli/configs.py os.environ['ACCELERATE_USE_DEEPSPEED']
        cli/configs.py configs.mixture.datasets
        cli/configs.py configs.script.dataset_name
        cli/torch_environment.py os.environ.setdefault
        cli/torch_environment.py os.environ['CUDA_VISIBLE_DEVICES']
        cli/torch_environment.py os.environ['PYTORCH_ALLOC_CONF']
        cli/train.py args.shows_traceback
        cli/train.py os.environ['DS_ACCELERATOR']
    """,
}


def is_present(file: str) -> bool:
    """Return whether a file is not of a feature whose folder is missing."""
    wing, feature, *_ = file.split("/")
    return wing != "features" or feature in PRESENT


def reviewed_changes() -> set[tuple[str, str]]:
    lines = [line.split(maxsplit=1) for text in REVIEWED.values() for line in text.strip().splitlines()]
    return {(file, change) for file, change in lines if is_present(file)}


FOREIGN = {change for change in SOURCE.foreign_changes() if change[0] != FENCE}


def test_nothing_outside_of_the_fence_changes_an_object_of_another_library():
    assert sorted(FOREIGN - reviewed_changes()) == []


def test_each_reviewed_change_is_still_there():
    assert sorted(reviewed_changes() - FOREIGN) == []


OWN_CLASSES = """
class Layer: ...

class Trainer:
    layer: Layer
    def __init__(self, model: "Model", first: Layer, second: Layer | None = None):
        self.first, self.model = first, model
"""
FOREIGN_CHANGES = {
    "an attribute": "def change(model): model.forward = print",
    "an attribute that an attribute has": "def change(trainer: Trainer): trainer.model.forward = print",
    "one of several": "def change(layer: Layer, model): layer.a, model.b = 1, 2",
    "an annotated one": "def change(model): model.a: int = 1",
    "a sum": "def change(model): model.a += 1",
    "a deletion": "def change(model): del model.a",
    "an entry": "def change(model): model.hooks[3] = print",
    "an entry of a namespace": "def change(module): vars(module)['convolve'] = print",
    "by setattr": "def change(model): setattr(model, 'a', 1)",
    "by a method": "def change(trainer: Trainer): trainer.model.callbacks.insert(0, print)",
    "a namespace by a method": "def change(module): vars(module).update(a=1)",
    "a variable that may be foreign": "def change(model):\n    x = Layer()\n    x = model\n    x.a = 1",
    "by a loop": "def change(model):\n    for model.a in []: pass",
    "by a context": "def change(model):\n    with open('x') as model.a: pass",
    "in a lambda's place": "def change(models):\n    for model in models: model.training = False",
}
OWN_CHANGES = {
    "its own": "class Part(Trainer):\n    def change(self): self.layer.a = 1",
    "a parameter": "def change(layer: Layer, last: 'Layer'): layer.a, last.a = 1, 2",
    "an attribute": "def change(trainer: Trainer): trainer.layer.a = 1",
    "an attribute that is given": "def change(trainer: Trainer): trainer.first.a = 1",
    "a result": "def make() -> Layer: ...\ndef change(): make().a = 1",
    "a variable": "def change():\n    layer = Layer()\n    layer.a = 1",
    "at the top": "LAYER = Layer()\ndef change(): LAYER.a = 1",
}


@pytest.mark.parametrize("text", FOREIGN_CHANGES.values(), ids=FOREIGN_CHANGES)
def test_a_foreign_change_is_found(text):
    assert len(PackageSource({"own.py": OWN_CLASSES, "other.py": text}).foreign_changes()) == 1


@pytest.mark.parametrize("text", OWN_CHANGES.values(), ids=OWN_CHANGES)
def test_a_change_of_an_own_object_is_not_foreign(text):
    assert PackageSource({"own.py": OWN_CLASSES, "other.py": text}).foreign_changes() == []


DEFINED = [node for node in SOURCE.trees[FENCE].body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
ENTRIES = [node for node in DEFINED if any(True for _ in SOURCE.changes_in(node, {}))]


def test_the_fence_has_entries():
    assert len(ENTRIES) > 15


@pytest.mark.parametrize("name", [entry.name for entry in ENTRIES if not entry.name.startswith("_")])
def test_the_head_of_the_fence_says_who_undoes_an_entry(name):
    """Explain each entry in the head: who undoes it, or why it stays."""
    text = ast.get_docstring(SOURCE.trees[FENCE]) or ""
    assert name in text.replace(",", "").split()


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_each_entry_says_when_it_can_go(entry):
    assert "an be removed" in " ".join((ast.get_docstring(entry) or "").split())


def names_of_trl_looked_up_in_calls(tree: ast.AST) -> list[str]:
    """Return what the bodies of functions read from the module `trl` when they are called, its version aside."""
    names = []
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for node_inside in (node for statement in function.body for node in ast.walk(statement)):
            if isinstance(node_inside, ast.Attribute) and ast.unparse(node_inside.value) == "trl":
                names.append(node_inside.attr)
    return [name for name in names if name != "__version__"]


def test_classes_of_trl_are_bound_at_import():
    """Scripts may set `trl.SFTTrainer` to ours, which would then call itself in place of TRL's."""
    looked_up = {file: names_of_trl_looked_up_in_calls(tree) for file, tree in SOURCE.trees.items()}
    assert {file: names for file, names in looked_up.items() if names} == {}
    assert names_of_trl_looked_up_in_calls(ast.parse("def f():\n    trl.SFTTrainer.train()")) == ["SFTTrainer"]
