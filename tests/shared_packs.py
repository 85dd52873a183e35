"""Scenarios of sequence parallelism on four real ranks (gloo, CPU); `test_shared_packs.py` launches them.

    python tests/shared_packs.py FOLDER [ENGINE/NAME ...]

The libraries are imported once, and the ranks of each launch are forks of that process: importing them costs more than
the scenarios. Each scenario returns a dictionary that rank 0 saves as FOLDER/ENGINE/NAME.pt; the first that raises ends
its launch.
"""

import copy
import faulthandler
import json
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import torch
import torch._dynamo
import torch._inductor.compile_fx  # DeepSpeed and torch.compile would import it in each rank
import torch.distributed as dist
import two_ranks
import yaml
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from support import engine_state, zoo
from support.double import in_double
from support.launch import fork_ranks
from support.models import build_tiny_model, build_tokenizer
from support.planners import make_stream
from support.prefixes import forest
from support.versions import run_deepspeed_on_cpus
from support.vision import build_model as build_image_model
from support.vision import build_processor, questions, rows
from sweep.image_families import make_examples
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

import trl_packfix
from trl_packfix import PackingLeakError
from trl_packfix.attention import exchange, forwards, mixer_prefixes, mixers, tower_division, varlen
from trl_packfix.attention.choice import select_attention
from trl_packfix.attention.exchange import HeadExchange
from trl_packfix.attention.forwards import mark_packed_forwards
from trl_packfix.attention.packed_forward import CU_SEQ_LENS, PackedForward, entered, packed_forwards
from trl_packfix.attention.tower_division import TowerDivision
from trl_packfix.attention.varlen import varlen_attention
from trl_packfix.cli import recipes
from trl_packfix.data import loaders, pack_collator, parts, stream
from trl_packfix.data.collator import IGNORE_INDEX, PackedDataCollator
from trl_packfix.data.prefix_collator import PrefixCollator
from trl_packfix.data.row_values import SOURCES, WEIGHTS, RowValuesCollator
from trl_packfix.data.token_order import token_order
from trl_packfix.isolation.check_isolation import check_isolation, check_prefixes
from trl_packfix.isolation.image_probe import ImageProbe
from trl_packfix.isolation.packed_model import PackedModel
from trl_packfix.isolation.prefix_probe import ImagePrefixProbe
from trl_packfix.layout import Layout, Runs, layout_of
from trl_packfix.planning.families import Pieces
from trl_packfix.training import objective
from trl_packfix.training.groups import SamePackCheck
from trl_packfix.training.planner import make_planner
from trl_packfix.training.totals import TrainingTotals

NUM_RANKS = 4

# Faults that a scenario plants, to see that its figures find them


@contextmanager
def leaking():
    """Attention on parts forgets the boundaries of documents."""
    forget = varlen._document_lengths

    def forgetful(kwargs, running, num_tokens):
        lengths = forget(kwargs, running, num_tokens)
        return [num_tokens] if running is not None and running.degree > 1 else lengths

    with mock.patch.object(varlen, "_document_lengths", forgetful):
        yield


@contextmanager
def wrong_chunks():
    """The parts of the pack arrive in the wrong order."""
    right = HeadExchange.to_heads

    def wrong(self, *states):
        return tuple(torch.cat(x.chunk(self.degree, dim=2)[::-1], dim=2) for x in right(self, *states))

    with mock.patch.object(HeadExchange, "to_heads", wrong):
        yield


@contextmanager
def wrong_heads():
    """The heads come back in the wrong order."""
    right = HeadExchange.to_tokens

    def wrong(self, out):
        heads = right(self, out)
        return torch.cat(heads.split([r.stop - r.start for r, _ in self._ranges], dim=2)[::-1], dim=2)

    with mock.patch.object(HeadExchange, "to_tokens", wrong):
        yield


@contextmanager
def without_prefixes():
    """Attention on parts takes the runs of a pack for whole documents."""
    right = PackedForward.shared.fget

    def wrong(self):
        return None if self.degree > 1 else right(self)

    with mock.patch.object(PackedForward, "shared", property(wrong)):
        yield


FAULTS = {"leak": leaking, "chunks": wrong_chunks, "heads": wrong_heads, "prefixes": without_prefixes}

# Attention alone

# Turns of a chat: 47 rows and padding, and runs attend to rows in other parts
CHAT = [[*range(20), 30 + n, *range(40, 45)] for n in range(4)]
LENGTHS = [5, 1, 30, 2, 9, 1]  # 48 tokens: parts of 24 and of 12, and the third document lies in several
HEADS = [(8, 8), (8, 4), (8, 2), (8, 1), (6, 3), (6, 2), (5, 1), (28, 4), (9, 3), (10, 5)]
WITH_FEATURES = [(8, 2), (6, 3)]
FEATURES = {
    "full": {},
    "window": {"sliding_window": 4},
    "sinks": {"sinks": True},
    "window and sinks": {"sliding_window": 4, "sinks": True},
    "value dim": {"value_dim": 6},
    "softcap": {"softcap": 2.0},
    "prefixes": {"prefixes": True},
    "window and prefixes": {"sliding_window": 4, "prefixes": True},
}


def attention(folder: Path) -> dict:
    """Largest difference of outputs and gradients from the whole pack, by case and by fault; in fp64."""
    start_gloo()
    exchange.make_groups((2, 4))
    cases = {
        f"{heads}/{kv_heads} {name} on {degree}": difference(heads, kv_heads, degree, **FEATURES[name])
        for heads, kv_heads in HEADS
        for name in (FEATURES if (heads, kv_heads) in WITH_FEATURES else ["full"])
        for degree in (2, 4)
    }
    faults = {}
    for name, fault in FAULTS.items():
        with fault():
            faults[name] = [difference(8, 2, degree, prefixes=name == "prefixes") for degree in (2, 4)]
    torch._dynamo.reset()
    counters.clear()
    compiled = {name: difference(8, 2, 2, compiled=True, prefixes=name == "prefixes") for name in ("full", "prefixes")}
    num_graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()  # else the graphs of the right exchange run
    with wrong_heads():
        compiled["fault"] = difference(8, 2, 2, compiled=True)
    return {
        "cases": cases,
        "faults": faults,
        "compiled": compiled,
        "graphs": num_graphs,
        "groups": {degree: group_ranks(degree) for degree in (2, 4)},
    }


def start_gloo() -> None:
    """For scenarios without a trainer, which starts it."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def group_ranks(degree: int) -> list[int]:
    return dist.get_process_group_ranks(exchange.group_of(degree))


def pack_of_runs() -> PackedForward:
    batch = PrefixCollator(pad_to_multiple_of=4)([{"input_ids": tokens} for tokens in CHAT])
    return PackedForward(*(batch[name] for name in CU_SEQ_LENS), kv_index=layout_of(batch).kv_index)


def difference(heads, kv_heads, degree, value_dim=4, sinks=False, prefixes=False, compiled=False, **features) -> float:
    """Of the outputs and of the gradients of queries, keys, values and sinks, on any rank."""
    attend = torch.compile(varlen_attention, backend="aot_eager") if compiled else varlen_attention
    generator = torch.Generator().manual_seed(heads)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32)
    whole = pack_of_runs() if prefixes else PackedForward(bounds, bounds, max(LENGTHS), max(LENGTHS))
    num_tokens = whole.num_tokens
    shapes = [(heads, num_tokens, 4), (kv_heads, num_tokens, 4), (kv_heads, num_tokens, value_dim)]
    states = [torch.randn(1, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    logits = torch.randn(heads, generator=generator, dtype=torch.float64)
    weights = torch.randn(1, num_tokens, heads, value_dim, generator=generator, dtype=torch.float64)
    tokens = num_tokens // degree
    first = dist.get_rank() % degree * tokens
    part = slice(first, first + tokens)

    def run(attend, forward, own):
        given = [x[:, :, own].clone().requires_grad_() for x in states] + [logits.clone().requires_grad_()]
        with entered(forward):
            out, _ = attend(nn.Module(), *given[:3], None, s_aux=given[3] if sinks else None, **features)
        grads = torch.autograd.grad(out, given, weights[:, own], allow_unused=True)
        return out.detach(), grads

    expected, expected_grads = run(varlen_attention, whole, slice(None))
    out, grads = run(attend, replace(whole, degree=degree, part_tokens=tokens), part)
    assert out.shape == (1, tokens, heads, value_dim)
    gaps = [out - expected[:, part]]
    gaps += [mine - whole[:, :, part] for mine, whole in zip(grads[:3], expected_grads[:3], strict=True)]
    if sinks:  # each rank has the gradient of its own heads
        total = grads[3].clone()
        dist.all_reduce(total, group=exchange.group_of(degree))
        gaps.append(total - expected_grads[3])
    largest = torch.stack([gap.abs().max() for gap in gaps]).max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


# Mixers of hybrid models


@contextmanager
def without_halo():
    """The convolution of a part begins with zeros."""
    with mock.patch.object(mixers, "exchange_halo", lambda rows, width, degree: torch.zeros_like(rows[:, :width])):
        yield


@contextmanager
def halo_without_gradient():
    """What the convolution of the next part reads gets no gradient."""
    right = exchange.exchange_halo
    with mock.patch.object(mixers, "exchange_halo", lambda *given: right(*given).detach()):
        yield


@contextmanager
def own_states_only():
    """A scan begins anew in each part, on all its heads."""
    right = mixers.run_scan

    def wrong(scan, running):
        if running.degree == 1:
            return right(scan, running)
        bounds = torch.tensor([0, running.part_tokens], dtype=torch.int32)
        return right(scan, PackedForward(bounds, bounds, running.part_tokens, running.part_tokens))

    with mock.patch.object(mixers, "run_scan", wrong):
        yield


@contextmanager
def gradients_of_one_rank_lost():
    """What the second rank of a group sends back is lost. It moves no state."""
    right = exchange._Exchange.backward

    def wrong(ctx, grad):
        found, *others = right(ctx, grad)
        found.split(ctx.send)[1].zero_()
        return found, *others

    with mock.patch.object(exchange._Exchange, "backward", staticmethod(wrong)):
        yield


@contextmanager
def halo_of_row_order():
    """The convolution of a run whose prefix lies in another part reads the rows before the run, as on parts alone."""
    right = mixer_prefixes.rows_before

    def wrong(running, rows, run, *, back):
        earlier, is_own = right(running, rows, run, back=back)
        if running.degree == 1 or running.kv_index is None:
            return earlier, is_own
        is_away = earlier // running.part_tokens != rows // running.part_tokens
        return torch.where(is_away, (rows - back).clamp(min=0), earlier), is_own

    with (
        mock.patch.object(mixer_prefixes, "rows_before", wrong),
        mock.patch.object(mixers, "rows_before", wrong),
    ):
        yield


@contextmanager
def lent_without_gradient():
    """What a convolution reads in another part gets no gradient, where documents share prefixes."""
    right = mixer_prefixes.Lent.exchange
    with mock.patch.object(mixer_prefixes.Lent, "exchange", lambda *given: right(*given).detach()):
        yield


@contextmanager
def wrong_parent_on_one_rank():
    """On the second rank of each group the pieces of a pack go on from the state of another piece, or from none."""
    right = mixer_prefixes.levels_of

    def wrong(running):
        found = right(running)
        if running.degree == 1 or running.index != 1:
            return found
        levels, num_before = [], 0
        for level in found.levels:
            others = (level.parents + 1) % num_before if num_before > 1 else None
            levels.append(replace(level, parents=others))
            num_before += sum(len(rows) for rows in level.batches)
        return replace(found, levels=levels)

    with mock.patch.object(mixer_prefixes, "levels_of", wrong):
        yield


MIXER_FAULTS = {"no_halo": without_halo, "no_gradient": halo_without_gradient, "no_states": own_states_only}
# Faults that move no state
GRADIENT_FAULTS = {"no_gradient": halo_without_gradient, "gradients_lost": gradients_of_one_rank_lost}
# What only shared prefixes on parts show
PREFIX_FAULTS = {
    "halo_of_row_order": halo_of_row_order,
    "lent_without_gradient": lent_without_gradient,
    "wrong_parent": wrong_parent_on_one_rank,
}
HYBRIDS = {"delta": "qwen3_5_text", "conv": "lfm2", "scan": "falcon_h1", "mamba": "mamba"}
# Three have a scan of their own, and all have one convolution
PLANTED_IN_MIXERS = {name: ["no_states"] for name in HYBRIDS.values()} | {"lfm2": ["no_halo", "no_gradient"]}
OF_PREFIXES = ["qwen3_5_text", "falcon_h1", "lfm2", "kimi_linear"]
# A type for each kind of scan; `benchmarks/sequence_parallel.py` runs all types
MIXED = ["qwen3_5_text", "kimi_linear", "lfm2", "falcon_h1", "mamba2", "mamba"]


def hybrids(folder: Path) -> dict:
    """Largest difference of parts from the whole pack, in fp64; and what the proof says, also with faults."""
    start_gloo()
    exchange.make_groups((2, 4))
    with in_double():
        cases = {kind: mixed_difference(kind, 4) for kind in MIXED}
        shared = {kind: shared_difference(kind, 4) for kind in OF_PREFIXES}
    verdicts = {}
    model = zoo.build_model("qwen3_5_text")
    trl_packfix.prepare_for_packing(model)
    for fault in PREFIX_FAULTS:
        with PREFIX_FAULTS[fault]():
            report = check_prefixes(model, degree=2)
        largest = max(report.max_change, report.max_difference, report.max_gradient or 0.0)
        verdicts["shared", fault] = report.isolated and report.equal, largest
    for name in HYBRIDS.values():
        model = zoo.build_model(name)
        packed = PackedModel(model, torch.float32, "cpu", 64)
        packed.prove(model)
        for fault, degree in (*((fault, 2) for fault in PLANTED_IN_MIXERS[name]), (None, 4)):
            with MIXER_FAULTS[fault]() if fault else nullcontext():
                try:
                    report = packed.prove_degree(model, degree)
                    verdicts[name, fault, degree] = report.isolated and report.equal, report.max_gradient
                except PackingLeakError as error:
                    verdicts[name, fault, degree] = False, str(error)
    return {"cases": cases, "shared": shared, "verdicts": verdicts}


def shared_difference(kind: str, degree: int) -> float:
    """Of documents that share prefixes from each of them alone, on the model as it was built; as `mixed_difference`."""
    model = zoo.build_model(kind).double().train()
    model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(2)

    def words(num: int) -> torch.Tensor:
        return torch.randint(16, 128, (num,), generator=generator)

    trunk, other = words(9), words(6)
    documents = [torch.cat([trunk[:4], words(3)]), *(torch.cat([trunk, words(n)]) for n in (5, 2)), words(7)]
    documents += [torch.cat([documents[1][:11], words(4)]), *(torch.cat([other, words(n)]) for n in (1, 6))]
    weights = [torch.randn(len(ids) - 1, 128, generator=generator, dtype=torch.float64) for ids in documents]
    alone = [model(ids[None], use_cache=False).logits[0, :-1] for ids in documents]
    sum((each * own).sum() for each, own in zip(alone, weights, strict=True)).backward()
    expected = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    select_attention(model)
    guard = mark_packed_forwards(model)
    batch = PrefixCollator(pad_to_multiple_of=degree, min_shared=1)([{"input_ids": ids} for ids in documents])
    layout, num_rows = layout_of(batch), batch["input_ids"].shape[1]
    assert layout.shares_rows and num_rows < sum(map(len, documents)) - 20
    wanted, of_rows = torch.zeros(2, num_rows, 128, dtype=torch.float64)
    for i, logits in enumerate(alone):
        wanted[layout.predicting(i)] = logits.detach()
        of_rows.index_add_(0, layout.predicting(i), weights[i])
    index = dist.get_rank() % degree
    part = slice(index * num_rows // degree, (index + 1) * num_rows // degree)
    given = parts.cut_part(batch, degree, index)
    logits = model(**{name: x for name, x in given.items() if "labels" not in name}).logits[0]
    (logits * of_rows[part]).sum().backward()
    guard.remove()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    for grad in grads:
        dist.all_reduce(grad, group=exchange.group_of(degree))
    is_predicting = wanted[part].any(-1)
    gaps = [(logits.detach() - wanted[part])[is_predicting].abs().max() / wanted.abs().max()]
    scale = max(x.abs().max() for x in expected)
    gaps += [(x - y).abs().max() / scale for x, y in zip(grads, expected, strict=True)]
    largest = torch.stack(gaps).max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def mixed_difference(kind: str, degree: int) -> float:
    """Of the logits, relative to the largest, and of the gradients of all parameters, summed over the parts."""
    model = zoo.build_model(kind).double().train()
    model.set_experts_implementation("eager")  # the grouped matrix product has no float64
    select_attention(model)
    guard = mark_packed_forwards(model)
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(16, 128, (n,), generator=generator) for n in LENGTHS]
    batch = PackedDataCollator(pad_to_multiple_of=degree)([{"input_ids": ids} for ids in documents])
    weights = torch.randn(1, sum(LENGTHS), 128, generator=generator, dtype=torch.float64)
    tokens = sum(LENGTHS) // degree
    first = dist.get_rank() % degree * tokens
    found = []
    for is_part in (False, True):
        given = parts.cut_part(dict(batch), degree, first // tokens) if is_part else dict(batch)
        own = slice(first, first + tokens) if is_part else slice(None)
        model.zero_grad()
        logits = model(**{name: x for name, x in given.items() if "labels" not in name}).logits
        (logits * weights[:, own]).sum().backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
        if is_part:
            for grad in grads:
                dist.all_reduce(grad, group=exchange.group_of(degree))
        found.append([logits.detach(), *grads])
    guard.remove()
    whole = [found[0][0][:, first : first + tokens], *found[0][1:]]
    scales = [found[0][0].abs().max(), *[max(x.abs().max() for x in whole[1:])] * len(whole[1:])]
    gaps = [(x - y).abs().max() / scale for x, y, scale in zip(found[1], whole, scales, strict=True)]
    largest = torch.stack(gaps).max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


# Training

TOKENS_PER_RANK = 32
TOKENS_OF_ALIKE = {"pack": 64, "family": 48}
ACCUMULATION = 3
MILLION = yaml.safe_load(recipes.read("qwen3-8b-1m"))
NUM_STEPS = 3


def documents(seed: int = 9, num_short: int = 40) -> Dataset:
    """Documents of up to 110 tokens, so that some need two ranks and some four; a third of each is a prompt."""
    rng = np.random.default_rng(seed)
    lengths = rng.permutation(np.concatenate([[110, 60, 50] * 3, rng.integers(3, 14, num_short)]))
    tokens = [rng.integers(4, 260, n).tolist() for n in lengths]
    labels = [[IGNORE_INDEX] * (len(ids) // 3) + ids[len(ids) // 3 :] for ids in tokens]
    rows = {"input_ids": tokens, "labels": labels}
    rows["weight"] = rng.choice([0.0, 0.5, 2.0], len(tokens)).tolist()
    quarter, sources = len(tokens) // 4, rng.choice(["a", "b"], len(tokens)).tolist()
    # Groups that read shards of their own meet the sources in different orders
    rows["source"] = ["b"] * quarter + ["a"] * quarter + sources[2 * quarter :]
    return Dataset.from_dict(rows)


def conversations(num: int = 40) -> Dataset:
    """Conversations of one to three turns, which become 2 samples each on average; all begin with the same words."""
    rng = np.random.default_rng(4)
    rows = []
    for i in range(num):
        messages = [{"role": "system", "content": "be brief"}]
        for _ in range(1 + i % 4 % 3):
            for role in ("user", "assistant"):
                messages.append({"role": role, "content": "".join(rng.choice(list("abc "), rng.integers(1, 5)))})
        rows.append({"messages": messages})
    return Dataset.from_list(rows)


class Shared(trl_packfix.SFTTrainer):
    """Notes the degree, index and real tokens of every micro-batch that reaches the model."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.engine = two_ranks.engine_of(model)
        layout = layout_of(inputs)
        self.seen.append((layout.degree, layout.index))
        self.shapes.add((layout.degree, inputs["input_ids"].shape[1], inputs.get("max_length_q")))
        with self.counted_in_tower():
            return super().training_step(model, inputs, num_items_in_batch)

    @contextmanager
    def counted_in_tower(self):
        """Count the tiles or patches that the vision tower computes on this rank."""
        modules = self.accelerator.unwrap_model(self.model).named_modules()
        first = [module for name, module in modules if name.endswith(("patch_embed", "patch_embedding"))]
        handles = [
            each.register_forward_pre_hook(lambda module, args: self.computed.append(len(args[0]))) for each in first
        ]
        yield
        for handle in handles:
            handle.remove()


class Whole(Shared):
    """One process that trains, one after the other, on the packs that the groups of ranks share."""

    def get_train_dataloader(self) -> DataLoader:
        super().get_train_dataloader()  # makes the report
        if self.shards is not None:
            return DataLoader(self._batches_of_streams(), batch_size=None)
        config = copy.copy(self.args)
        config.tokens_per_rank, config.gradient_accumulation_steps = self.tokens_per_rank, ACCUMULATION
        config.share_prefixes, documents = self.planned, self.data.documents
        if self.planned == "family":  # as the ranks are planned; here nothing is shared
            documents = replace(documents, tokens=token_order(self.data.reader, documents))
        planner = make_planner(
            config, documents, self.data.cost_model, world_size=NUM_RANKS, synchronisation="micro", batch_size=1
        )
        schedule = planner.schedule(0)
        rows = loaders.DocumentDataset(self.data.reader, self.data.documents, values=self.data.row_values)
        degrees = [degree for degree in schedule.degrees.tolist() for _ in range(NUM_RANKS)]
        batches = []
        for slot, degree in enumerate(degrees):
            indices = schedule.order[schedule.offsets[slot] : schedule.offsets[slot + 1]].tolist()
            batch = rows.__getitems__(indices or [loaders.EMPTY])
            collate = self.data.with_row_values(replace(self.data_collator, rows=PackedDataCollator(degree)))
            batches.append(collate(batch))
        return DataLoader(batches, batch_size=None)

    def _batches_of_streams(self) -> list[dict]:
        """What the streams of all ranks yield, each pack once, with nothing for the other ranks of its group."""
        streams = [
            iter(
                make_stream(
                    self.train_dataset.to_iterable_dataset(self.shards),
                    batch_size=1,
                    max_length=self.args.max_length,
                    accumulation=ACCUMULATION,
                    rank=rank,
                    world_size=NUM_RANKS,
                    cost_model=self.data.cost_model,
                    weight_column=self.args.weight_column,
                    source_column=self.args.source_column,
                    tokens_per_rank=self.tokens_per_rank,
                )
            )
            for rank in range(NUM_RANKS)
        ]
        batches = []
        for _ in range(NUM_STEPS * ACCUMULATION):
            for each in streams:
                pack = next(each)
                part = pack if isinstance(pack, parts.PartOf) else parts.PartOf(pack, 1, 0)
                documents = [loaders.dummy_document(0)] if part.index else part.documents
                collate = PackedDataCollator(pad_to_multiple_of=part.degree)
                if self.args.weight_column is not None:
                    columns = {WEIGHTS: WEIGHTS, SOURCES: SOURCES}
                    index = {name: i for i, name in enumerate(self.data.row_values.names)}
                    collate = RowValuesCollator(collate, columns, index)
                batches.append(collate(documents))
        return batches


class Reversed(Whole):
    """The same with the gradients of a step added in the opposite order, which changes nothing but their rounding."""

    def get_batch_samples(self, *given):
        batches, num_items = super().get_batch_samples(*given)
        return batches[::-1], num_items


LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
MODELS = {
    "llama": ("llama", {}),
    "sinks": ("gpt_oss", {}),
    "odd_heads": ("llama", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "experts": ("mixtral", {}),
    "yarn": (
        "qwen3",
        {
            "max_position_embeddings": NUM_RANKS * TOKENS_PER_RANK,
            "rope_parameters": MILLION["model_init_kwargs"]["rope_parameters"]
            | {"factor": float(NUM_RANKS), "original_max_position_embeddings": TOKENS_PER_RANK},
        },
    ),
}


def make_trainer(
    folder: Path,
    name: str,
    engine: str | None = None,
    cls: type = Shared,
    model: str = "llama",
    peft_config: LoraConfig | None = None,
    dtype: torch.dtype = torch.float32,
    data: Dataset | None = None,
    alike: str = "",
    shards: int | None = None,
    **settings,
) -> Shared:
    """A trainer on four ranks, or in one process on the same packs, that writes to `folder / name`.

    With `alike`, a value of `share_prefixes`, documents begin alike, and four ranks share these beginnings. With
    `shards` the ranks read a stream of so many. A `model` with images has documents with images. With
    `is_proved=False` the proof on parts of packs is left out, and with `recomputes` FSDP checkpoints the layers.
    """
    is_proved, recomputes = settings.pop("is_proved", True), settings.pop("recomputes", False)
    is_one, has_images = engine is None, model in MODELS_OF_IMAGES
    tokens_per_rank = TOKENS_OF_ALIKE.get(alike, TOKENS_PER_RANK)
    if has_images:
        tokens_per_rank = (4 if alike else 3) * TOKENS_PER_RANK
    defaults = {
        "share_prefixes": alike if alike and not is_one else "off",
        "packing_strategy": "bfd" if alike else "stream",
        "max_length": 384 if has_images else 112,
        "packing": True,
        "packing_report": False,
        "tokens_per_rank": None if is_one else tokens_per_rank,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": ACCUMULATION * (NUM_RANKS if is_one else 1),
        "learning_rate": 2.0 if peft_config else 0.5,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "max_steps": NUM_STEPS,
        "gradient_checkpointing": False,
        "bf16": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "ddp_timeout": 90,  # turns a hang into an error
        **two_ranks.engine_settings(engine, folder),
    }
    if recomputes and not is_one:
        defaults["fsdp_config"] |= {"activation_checkpointing": True}
    held_out = forest(20, seed=3) if alike else documents(seed=1, num_short=10)
    if has_images:
        data = questions(96) if alike else rows(40, counts=(0, 0, 0, 0, 1, 2, 4))
        held_out = data.select(range(12))
    elif settings.get("per_turn"):
        data, held_out = conversations(), None
    elif data is None:
        data = forest(60) if alike else documents()
        data = data if shards is None or is_one else data.to_iterable_dataset(shards)
    args = trl_packfix.SFTConfig(str(folder / name), **(defaults | settings))
    torch.manual_seed(0)  # for the adapters
    kind = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    trainer = cls(
        kind.from_pretrained(folder / "models" / model, dtype=dtype),
        args,
        train_dataset=data,
        eval_dataset=held_out,
        processing_class=build_processor(model) if has_images else build_tokenizer(),
        peft_config=peft_config,
    )
    trainer.seen, trainer.tokens_per_rank, trainer.shards, trainer.computed = [], tokens_per_rank, shards, []
    trainer.planned, trainer.shapes = alike or "off", set()
    if not is_proved:
        trainer.packed_model.prove_degree = lambda wrapped, degree: None
    return trainer


def weights(trainer: Shared) -> torch.Tensor | None:
    """All parameters in fp64, on rank 0. All ranks must call it."""
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.args.process_index:
        return None
    return torch.cat([value.double().flatten().cpu() for _, value in sorted(state.items())])


LOGGED = ("loss", "entropy", "mean_token_accuracy", "trained_tokens", "num_tokens", "documents_per_step", "aux_loss")
LOGGED += ("loss/a", "trained_tokens/a", "computed_share")


@contextmanager
def in_little_memory(tiles: int):
    """The MLP in tiles, and a count of what is offloaded.

    Under ZeRO-3 all ranks must call a layer equally often, so tiles have a number, not a size. transformers pins what
    is offloaded, which torch cannot do without an accelerator, so say that there is none.
    """
    whole = Qwen3MLP.forward

    def tiled(self, x):
        return torch.cat([whole(self, tile) for tile in x.tensor_split(tiles, dim=1)], dim=1)

    with (
        mock.patch.object(Qwen3MLP, "forward", tiled),
        mock.patch.object(torch.cpu, "is_available", return_value=False) as asked,
    ):
        yield asked


def train(
    folder: Path, name: str, engine: str | None = None, evaluates: bool = False, finds: str | None = None, **settings
) -> dict:
    """The weights before and after training, and what is logged."""
    trainer = make_trainer(folder, name, engine, **settings)
    start = torch.cat([p.detach().double().flatten() for _, p in sorted(trainer.model.state_dict().items())])
    offloads = (trainer.args.gradient_checkpointing_kwargs or {}).get("offload")
    with in_little_memory(tiles=3 if engine else 1) if offloads else nullcontext() as offloaded:
        trainer.train()
    logged = [[entry.get(key) for key in LOGGED] for entry in trainer.state.log_history if "loss" in entry]
    report = trainer.packing_report
    return {
        "verdicts": verdicts_of_engine(trainer, finds) if finds else None,
        "engine": trainer.engine,
        "offloaded": offloaded.call_count if offloads else 0,
        "start": start,
        "end": weights(trainer),
        "logged": logged,
        "seen": trainer.seen,
        "shapes": trainer.shapes,
        "micro_steps": (report.shared or report.groups).micro_steps if engine else None,
        "proved": sorted(trainer.packed_model._proved_degrees),
        "eval_loss": trainer.evaluate()["eval_loss"] if evaluates else None,
        "computed_in_tower": sum(verdicts_of_all(sum(trainer.computed))) if engine else sum(trainer.computed),
    }


def verdicts_of_engine(trainer: Shared, fault: str) -> dict:
    """Of the wrapped model on two ranks per pack: what the proof says of gradients and of states, also with a fault.

    "changed" is what the proofs changed of the engine, on any rank.
    """
    found, before = {}, engine_state.snapshot(trainer)
    with trainer.packed_model.attending():
        for planted in (None, fault):
            with GRADIENT_FAULTS[planted]() if planted else nullcontext():
                report = check_isolation(trainer.model_wrapped, 64, degree=2)
            found[planted] = report.max_gradient, report.max_change <= report.tolerance and report.equal
    changed = verdicts_of_all(engine_state.changed(before, engine_state.snapshot(trainer)))
    return found | {"changed": sum(changed, [])}


def restart(folder: Path, name: str, engine: str, **settings) -> dict:
    """AdamW over two epochs or passes, whole and again from a checkpoint in the middle of the second."""
    settings = {"max_steps": -1, "num_train_epochs": 2, "optim": "adamw_torch", "learning_rate": 1e-2} | settings
    stop = 4
    whole = make_trainer(folder, f"{name}/whole", engine, save_strategy="steps", save_steps=stop, **settings)
    whole.train()
    resumed = make_trainer(folder, f"{name}/resumed", engine, **settings)
    resumed.train(resume_from_checkpoint=str(folder / name / "whole" / f"checkpoint-{stop}"))
    tokens = [[e["num_tokens"] for e in run.state.log_history if "loss" in e] for run in (whole, resumed)]
    return {
        "weights": [weights(whole), weights(resumed)],
        "tokens": tokens,
        "seen": [whole.seen, resumed.seen],
        "steps_to_compare": resumed.training_objective.same_pack.steps_left,
        "reports": [run.packing_report.to_dict() for run in (whole, resumed)],
    }


# Faults of training


@contextmanager
def late_shift():
    """Labels are shifted after the cut."""
    right = parts.cut_part

    def wrong(batch, degree, index, **given):
        part = right(batch, degree, index, **given)
        if degree > 1:
            own = part["labels"]
            part["shift_labels"] = torch.cat([own[:, 1:], torch.full_like(own[:, :1], IGNORE_INDEX)], dim=1)
        return part

    with mock.patch.object(pack_collator, "cut_part", wrong):
        yield


@contextmanager
def counted_by_all():
    """Every member of a group counts documents and statistics."""
    with mock.patch.object(Layout, "is_first", True):
        yield


@contextmanager
def statistic_of_parts():
    """The load-balancing statistic is that of each part."""

    def wrong(router_logits, num_experts, num_chosen, row_counts, degree):
        found = objective.load_balancing_loss_func(tuple(router_logits), num_experts, num_chosen, row_counts[None])
        return found / degree

    with mock.patch.object(objective, "group_load_balancing", wrong):
        yield


@contextmanager
def one_label_per_row():
    """A row of which several documents train the next token counts as one trained token."""
    with mock.patch.object(Runs, "labels", lambda self, batch: batch):
        yield


@contextmanager
def border_lost():
    """The targets of the last row of a part, whose labels lie in the next part, belong to no rank."""

    def lost(layout, size):
        stays = layout.target_rows < size
        return replace(layout, target_rows=layout.target_rows[stays], target_documents=layout.target_documents[stays])

    with changed_cut(lost):
        yield


@contextmanager
def trained_on_own_rows():
    """A part counts the trained tokens of its own rows, not those of the pack."""

    def own(layout, size):
        return replace(layout, trained=torch.bincount(layout.target_documents, minlength=layout.count))

    with changed_cut(own):
        yield


@contextmanager
def history_trained():
    """What one document trains in a part is trained in all documents that have it, as the history of a turn."""

    def repeated(layout, size):
        times = layout.num_documents[layout.target_rows - 1]
        return replace(
            layout,
            target_rows=layout.target_rows.repeat_interleave(times),
            target_documents=layout.target_documents.repeat_interleave(times),
        )

    with changed_cut(repeated):
        yield


@contextmanager
def changed_cut(change):
    right = Runs.cut

    def wrong(self, rows, mask):
        return change(right(self, rows, mask), rows.stop - rows.start)

    with mock.patch.object(Runs, "cut", wrong):
        yield


@contextmanager
def rows_once():
    """The router statistic counts a row once, and not once for each of its documents."""
    right = Runs.row_counts
    with mock.patch.object(Runs, "row_counts", lambda self, trained: right(self, trained).clamp(max=1)):
        yield


@contextmanager
def own_shards():
    """Each rank reads shards of its own, as without sequence parallelism, and not those of its group."""
    right = stream.share_of_rank

    def wrong(dataset, rank, world_size, degree=1):
        return replace(right(dataset, rank, world_size), index=rank % degree, count=degree)

    with mock.patch.object(stream, "share_of_rank", wrong):
        yield


@contextmanager
def own_shards_unseen():
    with own_shards(), mock.patch.object(SamePackCheck, "check", lambda self, batches: None):
        yield


@contextmanager
def sources_as_met():
    """Ranks add the sums of sources as each has numbered them, and not by their names."""
    right = TrainingTotals._agree_on_sources
    with mock.patch.object(TrainingTotals, "_agree_on_sources", lambda self, own: right(self, sorted(own))):
        yield


@contextmanager
def cut_short():
    """Of a family of several documents, the last one is left out."""
    right = Pieces.documents

    def wrong(pieces, *given):
        sizes = np.diff(pieces.offsets)
        stays = np.ones(len(pieces.order), dtype=bool)
        stays[pieces.offsets[1:][sizes > 1] - 1] = False
        offsets = np.concatenate([[0], np.cumsum(sizes - (sizes > 1))])
        kept = {name: getattr(pieces, name)[stays] for name in ("order", "lengths", "shared")}
        return right(replace(pieces, offsets=offsets, **kept), *given)

    with mock.patch.object(Pieces, "documents", wrong):
        yield


def changed_inputs(change):
    """What enters the decoder of an image-text model is changed by `change(part, inputs, rows)`."""
    right = forwards.cut_to_part

    def wrong(inputs, part_tokens, index):
        part = right(inputs, part_tokens, index)
        if part is inputs:
            return part
        return part | change(part, inputs, slice(index * part_tokens, (index + 1) * part_tokens))

    return mock.patch.object(forwards, "cut_to_part", wrong)


def cut_late():
    """The parts of a pack with images begin one token late."""

    def late(part, inputs, rows):
        return {"inputs_embeds": inputs["inputs_embeds"].roll(-1, 1)[:, rows]}

    return changed_inputs(late)


def positions_of_the_first():
    """Every part of a pack with images has the positions of the first."""
    return changed_inputs(
        lambda part, inputs, rows: {"position_ids": inputs["position_ids"][..., : rows.stop - rows.start]}
    )


def features_of_the_first():
    """Every part has the deepstack features of the images at the beginning of the pack."""

    def first(part, inputs, rows):
        name = "deepstack_visual_embeds"
        if part.get(name) is None:
            return {}
        return {name: [whole[: len(own)] for whole, own in zip(inputs[name], part[name], strict=True)]}

    return changed_inputs(first)


@contextmanager
def features_late():
    """Ranks that divide the images of a pack put what the tower returns one row late."""
    right = TowerDivision.exchanged

    def wrong(self, output, group):
        return tree_map_only(torch.Tensor, lambda tensor: tensor.roll(1, 0), right(self, output, group))

    with mock.patch.object(TowerDivision, "exchanged", wrong):
        yield


@contextmanager
def features_without_gradients():
    """The images of a pack get no gradients. The proof of a degree compares states only."""
    right = tower_division.exchange_pieces
    with mock.patch.object(tower_division, "exchange_pieces", lambda *given, **group: right(*given, **group).detach()):
        yield


@contextmanager
def other_images():
    """On odd ranks the images of a pack that ranks share are in another order."""
    right = parts.cut_part

    def wrong(batch, degree, index, **given):
        if index % 2 and "pixel_values" in batch:
            batch["pixel_values"] = batch["pixel_values"].flip(0)
        return right(batch, degree, index, **given)

    with mock.patch.object(pack_collator, "cut_part", wrong):
        yield


@contextmanager
def other_images_unseen():
    with other_images(), mock.patch.object(SamePackCheck, "check", lambda self, batches: None):
        yield


@contextmanager
def unproved_other_images():
    """The proof would find it, too."""
    with other_images(), mock.patch("trl_packfix.training.callbacks.prove_degrees", make_groups_only):
        yield


IMAGE_FAULTS = {
    "cut_late": cut_late,
    "positions_of_the_first": positions_of_the_first,
    "features_of_the_first": features_of_the_first,
    "features_late": features_late,
    "other_images": other_images,
}
# By model: fault, degree and what is proved
IMAGE_PROOFS = {
    "llava": [
        (None, 2, "shared"),
        ("cut_late", 2, "images"),
        ("features_late", 2, "images"),
        ("cut_late", 2, "text"),
    ],
    "qwen3_vl": [
        (None, 4, "shared"),
        ("positions_of_the_first", 2, "images"),
        ("features_of_the_first", 2, "images"),
        ("other_images", 2, "images"),
    ],
}
TRAINING_FAULTS = {
    "family_prefixes": without_prefixes,
    "family_border_lost": border_lost,
    "family_cut_short": cut_short,
    "family_weighted_by_all": counted_by_all,
    "history_trained": history_trained,
    **IMAGE_FAULTS,
    "features_without_gradients": features_without_gradients,
    "other_images_unseen": other_images_unseen,
    "own_shards_unseen": own_shards_unseen,
    "sources_as_met": sources_as_met,
    **FAULTS,
    "one_label_per_row": one_label_per_row,
    "trained_on_own_rows": trained_on_own_rows,
    "rows_once": rows_once,
    "alike_counted_by_all": counted_by_all,
    "alike_routed_by_all": counted_by_all,
    "late_shift": late_shift,
    "counted_by_all": counted_by_all,
    "statistic_of_parts": statistic_of_parts,
}


def faulty(folder: Path, fault: str, **settings) -> dict:
    """The same training with a fault that the proof cannot see, or that is planted after it."""
    with TRAINING_FAULTS[fault](), mock.patch("trl_packfix.training.callbacks.prove_degrees", make_groups_only):
        return train(folder, f"faulty_{fault}", **settings)


def make_groups_only(trainer, degrees) -> None:
    exchange.make_groups(degrees)


def other_tokens() -> Dataset:
    """On rank 1 other tokens."""
    data = documents()
    if dist.is_initialized() and dist.get_rank() == 1:
        data = data.map(lambda row: {"input_ids": [4 + (token + 1) % 250 for token in row["input_ids"]]})
    return data


def other_second_pass() -> IterableDataset:
    """A stream that on rank 1 has shorter documents in its second pass, so that other degrees may be chosen."""
    data, ended = documents(), []

    def shorter(row, index):
        kept = len(row["input_ids"]) - (bool(ended) and dist.get_rank() == 1)
        if index == len(data) - 1:
            ended.append(True)
        return {"input_ids": row["input_ids"][:kept], "labels": row["labels"][:kept]}

    return data.to_iterable_dataset().map(shorter, with_indices=True)


def other_packs(folder: Path, engine: str, name: str, data: Callable | None = None, **settings) -> dict:
    """What is said when rank 1 has read other documents than rank 0, and after which step."""
    trainer = make_trainer(folder, name, engine, data=data and data(), **settings)
    message = ""
    fault = {"ddp/own_shards": own_shards, "ddp/other_images": unproved_other_images}.get(name, nullcontext)
    try:
        with fault():
            trainer.train()
    except ValueError as error:
        message = str(error)
    messages = [None] * NUM_RANKS
    dist.all_gather_object(messages, message)
    return {"messages": messages, "step": trainer.state.global_step}


class TokenShift(nn.Module):
    """Adds to each token the one before it in its document: right on whole packs, and blind on parts."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        before = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], dim=1)
        if packed_forwards:
            starts = packed_forwards[-1].cu_seq_lens_q[:-1].long()
            before = before.index_fill(1, starts[starts < states.shape[1]], 0.0)
        return self.inner(states + before)


# Faults that the proof finds, by model: of documents that share nothing, and of shared prefixes
PROOFS = {"llama": ["leak", "chunks", "heads"], "gpt_oss": []}
PREFIX_PROOFS = {"llama": ["leak", "prefixes"], "gpt_oss": []}


def proofs(folder: Path, engine: str) -> dict:
    """The verdicts of all ranks on a right model, and on each fault; on models that cannot be shared."""
    start_gloo()
    found = {}
    for model, faults in PROOFS.items():
        built = build_tiny_model(model)
        select_attention(built)
        for fault, degree in ((None, 2), (None, 4), *((fault, 2) for fault in faults)):
            with FAULTS[fault]() if fault else nullcontext():
                report = trl_packfix.check_isolation(built, degree=degree)
            found[model, fault, degree] = (report.isolated, report.equal, [leak.module for leak in report.leaks])
    shifting = build_tiny_model("llama")
    shifting.model.layers[1].mlp = TokenShift(shifting.model.layers[1].mlp)
    bloom = build_tiny_model("bloom")
    for model, faults in PREFIX_PROOFS.items():
        built = build_tiny_model(model)
        trl_packfix.prepare_for_packing(built)
        for fault, degree in ((None, 1), (None, 2), (None, 4), *((fault, 2) for fault in faults)):
            with FAULTS[fault]() if fault else nullcontext():
                report = check_prefixes(built, degree=degree)
                whole = trl_packfix.check_isolation(built, degree=degree) if fault == "prefixes" else report
            found["shared", model, fault, degree] = (
                report.isolated and report.equal,
                whole.isolated and whole.equal,
                report.max_difference / report.tolerance,
            )
    for model in (shifting, bloom):
        select_attention(model)
    for degree in (1, 2):
        report = trl_packfix.check_isolation(shifting, degree=degree)
        found["shift", degree] = (report.isolated, report.equal, [leak.module for leak in report.leaks])
    found["bloom"] = trl_packfix.check_isolation(bloom, degree=2).error
    return {"verdicts": verdicts_of_all(found)}


def verdicts_of_all(found: Any) -> list:
    everyone = [None] * NUM_RANKS
    dist.all_gather_object(everyone, found)
    return everyone


def image_proofs(folder: Path) -> dict:
    """As `proofs`, for models with images: of documents with images, of text alone, and of shared prefixes."""
    start_gloo()
    found = {}
    checks = {"images": trl_packfix.check_isolation, "shared": check_prefixes, "text": trl_packfix.check_isolation}
    for model, faults in IMAGE_PROOFS.items():
        built = build_image_model(model)
        select_attention(built)
        for fault, degree, name in ((None, 2, "images"), *faults):
            images = None if name == "text" else make_examples(model, built)
            with IMAGE_FAULTS[fault]() if fault else nullcontext():
                report = checks[name](built, 512, degree, images=images)
            size = max(report.max_change, report.max_difference) / report.tolerance
            found[name, model, fault, degree] = (report.isolated and report.equal, size, report.error)
        for name, kind in (("images", ImageProbe), ("shared", ImagePrefixProbe)):
            probe = kind(built, make_examples(model, built), degree=2)
            ids = probe._batch(probe.image_examples()[0])["input_ids"][0]
            is_image = ids == probe.images.processor.image_token_id
            found["split", model, name] = bool(is_image[len(ids) // 2 - 1 : len(ids) // 2 + 1].all())
    return {"verdicts": verdicts_of_all(found)}


# Launches

# The proof on parts of packs costs more than training. Others have the model and the engine of these, and its proof.
UNPROVED = {"is_proved": False}
KINDS: dict[str, dict] = {
    "full": {"evaluates": True},
    "full_checkpointed": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "full_reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    # The recipe of a million tokens, in small
    "million": {
        "model": "yarn",
        "max_length": NUM_RANKS * TOKENS_PER_RANK,
        "gradient_checkpointing": MILLION["gradient_checkpointing"],
        "gradient_checkpointing_kwargs": MILLION["gradient_checkpointing_kwargs"],
    },
    "dora_fp64": {"peft_config": replace(LORA, use_dora=True), "dtype": torch.float64},
    "sinks": {"model": "sinks"},  # every second layer has a window
    # All parts of packs have one shape
    "odd_heads": {"model": "odd_heads", "pad_documents_to_multiple_of": 8},
    # The packs of one process are padded, too: with this setting the statistic leaves padding out
    "experts": {"model": "experts", "router_aux_loss_coef": 0.1, "pad_to_multiple_of": 1},
    "smoothed": {"label_smoothing_factor": 0.3, "document_weighting": "document"} | UNPROVED,
    # Documents that share prefixes, against one process in which nothing is shared
    "alike_recomputed": {"alike": "pack", "recomputes": True} | UNPROVED,
    "alike_dft": {"alike": "pack", "loss_type": "dft", "learning_rate": 50.0} | UNPROVED,
    "alike_smoothed": {"alike": "pack", "label_smoothing_factor": 0.3, "document_weighting": "document"} | UNPROVED,
    "alike_experts": {"alike": "pack", "model": "experts", "router_aux_loss_coef": 0.1, "pad_to_multiple_of": 1}
    | UNPROVED,
    # Brought together, and planned by what is computed of them
    "alike_family": {"alike": "family", "evaluates": True},
    "alike_family_weighted": {"alike": "family", "weight_column": "share", "source_column": "source"} | UNPROVED,
    # Several samples of each conversation; what one of them trains is the history of others
    "alike_family_turns": {"alike": "family", "per_turn": True} | UNPROVED,
    # Streams: all ranks read everything, with a degree per micro-step; groups of two read shards of their own
    "stream": {"shards": 1, "evaluates": True},
    "stream_shards": {"shards": 4, "max_length": 64, "pad_to_multiple_of": 64, "weight_column": "weight"}
    | {"source_column": "source"},
    "alike_stream": {"alike": "pack", "shards": 1, "packing_strategy": "stream"},
    # Recurrent mixers
    "delta_checkpointed": {"model": "delta", "gradient_checkpointing": True},
    "alike_delta": {"model": "delta", "alike": "pack"},
    "alike_conv": {"model": "conv", "alike": "pack"},
    "mamba": {"model": "mamba"},
    "mamba_checkpointed": {"model": "mamba", "gradient_checkpointing": True},
    # Images that lie in several parts
    "images_llava": {"model": "llava", "evaluates": True} | UNPROVED,
    "images_qwen2_5_vl": {"model": "qwen2_5_vl", "gradient_checkpointing": True},
    "images_qwen3_vl": {"model": "qwen3_vl"} | UNPROVED,
    "alike_images_llava": {"model": "llava", "alike": "pack", "evaluates": True},
    "alike_family_images": {"model": "qwen3_vl", "alike": "family"} | UNPROVED,
}
ALIKE = "alike_smoothed alike_experts alike_family alike_family_weighted alike_family_turns".split()
STREAMS = ["stream", "stream_shards", "alike_stream"]
OF_IMAGES = [kind for kind in KINDS if "images" in kind]
MODELS_OF_IMAGES = {KINDS[kind]["model"] for kind in OF_IMAGES}
# The tests run these; `benchmarks/sequence_parallel.py` runs all kinds under all engines
OF_ENGINES = {
    "ddp": [
        *(
            "full",
            "dora_fp64",
            "odd_heads",
            "sinks",
            "experts",
            "smoothed",
            "delta_checkpointed",
            "alike_delta",
            "mamba",
        ),
        *ALIKE,
        *STREAMS,
        *OF_IMAGES,
    ],
    "zero3": ["alike_family", "million", "mamba_checkpointed", "images_llava"],
    "zero3_offload": ["full_reentrant"],
    "fsdp2": ["full", "alike_recomputed", "alike_conv"],
}
# Rounding is that of the dtype and the optimizer. It is measured on these kinds, and the largest holds for all
ROUNDING = ["full", "delta_checkpointed", "alike_family_weighted", "images_llava"]
# The same proof on degrees runs under the same engine, and for the same model under DDP
PROVED_ELSEWHERE = [("ddp", "alike_stream"), ("zero3", "alike_family")]
# After these trainings the proof must find a fault in gradients through the engine
FINDING_FAULTS = {("zero3", "mamba_checkpointed"): "gradients_lost", ("fsdp2", "alike_conv"): "no_gradient"}
LAUNCHES = {
    "one": [None],
    "ddp": ["ddp"],
    "deepspeed": ["zero3", "zero3_offload"],
    "fsdp2": ["fsdp2"],
}
# What a fault is planted in; the tests of attention and of the proof have those of the exchange
PLANTED = {
    "late_shift": "full",
    "counted_by_all": "smoothed",
    "statistic_of_parts": "experts",
    # What only shared prefixes on parts show
    "one_label_per_row": "alike_experts",
    "alike_counted_by_all": "alike_smoothed",
    "trained_on_own_rows": "alike_smoothed",
    "rows_once": "alike_experts",
    "alike_routed_by_all": "alike_experts",
    # What only families on parts show
    "family_prefixes": "alike_family",
    "family_border_lost": "alike_family",
    "family_cut_short": "alike_family",
    "family_weighted_by_all": "alike_family_weighted",
    "history_trained": "alike_family_turns",
    # What only images on parts show
    "cut_late": "images_llava",
    "positions_of_the_first": "images_qwen2_5_vl",
    "features_of_the_first": "images_qwen3_vl",
    "features_late": "images_llava",
    "features_without_gradients": "images_qwen3_vl",
    "other_images_unseen": "alike_images_llava",
    # What only streams show
    "own_shards_unseen": "stream_shards",
    "sources_as_met": "stream_shards",
}

# With compiled models, where they are asked for; compared with one process without. Documents that share prefixes
# exchange what others do, and more. These packs have two degrees and not three, as each is compiled for itself
COMPILED = ("alike_family",)


def is_proved(engine: str, kind: str) -> bool:
    """Whether the proof on parts of packs runs before this training."""
    return KINDS[kind].get("is_proved", True) and (engine, kind) not in PROVED_ELSEWHERE


def scenarios(launch: str) -> dict[str, Callable[[Path], dict]]:
    """By engine and name, in the order in which they run."""
    found: dict[str, Callable[[Path], dict]] = {}
    for engine in LAUNCHES[launch]:
        compared = [kind for kind in KINDS if any(kind in kinds for kinds in (*OF_ENGINES.values(), ROUNDING))]
        for kind in compared if engine is None else OF_ENGINES[engine]:
            settings = {"engine": engine} | KINDS[kind]
            if engine is None:
                found[f"one/{kind}"] = partial(train, name=f"one/{kind}", cls=Whole, **settings)
                if kind in (*ROUNDING, *COMPILED):
                    settings = {key: value for key, value in settings.items() if key != "evaluates"}
                    name = f"one/{kind}_reversed"
                    found[name] = partial(train, name=name, cls=Reversed, **settings)
            else:
                finds = FINDING_FAULTS.get((engine, kind))
                settings |= {"is_proved": is_proved(engine, kind)}
                found[f"{engine}/{kind}"] = partial(train, name=f"{engine}/{kind}", finds=finds, **settings)
    if launch == "ddp":
        found["ddp/restart"] = partial(restart, name="ddp/restart", engine="ddp")
        for kind in ("stream", "stream_shards"):
            settings = {key: value for key, value in KINDS[kind].items() if key != "evaluates"} | {"max_steps": 6}
            found[f"ddp/restart_{kind}"] = partial(restart, name=f"ddp/restart_{kind}", engine="ddp", **settings)
        found["ddp/restart_images"] = partial(
            restart, name="ddp/restart_images", engine="ddp", model="llava", **UNPROVED
        )
        found["ddp/attention"] = attention
        found["ddp/hybrids"] = hybrids
        found["ddp/proofs"] = partial(proofs, engine="ddp")
        found["ddp/image_proofs"] = image_proofs
        for fault, kind in PLANTED.items():
            settings = {key: value for key, value in KINDS[kind].items() if key != "evaluates"}
            found[f"ddp/faulty_{fault}"] = partial(faulty, fault=fault, engine="ddp", **settings)
        for kind in COMPILED:
            settings = {key: value for key, value in KINDS[kind].items() if key != "evaluates"}
            settings |= {"torch_compile": True, "torch_compile_backend": "eager"}
            found[f"ddp/compiled_{kind}"] = partial(train, name=f"ddp/compiled_{kind}", engine="ddp", **settings)
        others = {
            "other_packs": {"data": other_tokens},
            "other_second_pass": {"data": other_second_pass, "max_steps": 6},
            "own_shards": KINDS["stream_shards"],
            "other_images": KINDS["images_qwen3_vl"],
        }
        for name, settings in others.items():
            found[f"ddp/{name}"] = partial(other_packs, engine="ddp", name=f"ddp/{name}", **settings)
    return found


def run_rank(launch: str, folder: Path, only: list[str]) -> None:
    """The scenarios of a launch, or `only` some."""
    if launch == "deepspeed":
        run_deepspeed_on_cpus()
    for name, scenario in scenarios(launch).items():
        if name not in only and (only or name.startswith(("ddp/compiled", "ddp/faulty"))):
            continue
        result = scenario(folder)
        if int(os.environ.get("RANK", 0)) == 0:
            (folder / name).parent.mkdir(exist_ok=True)
            torch.save(result, folder / f"{name}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


def main(folder: Path, only: list[str]) -> int:
    faulthandler.enable()
    warnings.simplefilter("ignore")
    for engine in LAUNCHES["deepspeed"]:
        (folder / f"{engine}.json").write_text(json.dumps(two_ranks.deepspeed_config(engine)))
    for name, (model_type, sizes) in MODELS.items():
        build_tiny_model(model_type, **sizes).save_pretrained(folder / "models" / name)
    for name, model_type in HYBRIDS.items():
        model = zoo.build_model(model_type, vocab_size=300, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        model.save_pretrained(folder / "models" / name)
    for name in MODELS_OF_IMAGES:
        build_image_model(name).save_pretrained(folder / "models" / name)
    launches = [name for name in LAUNCHES if not only or set(only) & scenarios(name).keys()]
    ended = [fork_ranks(1 if name == "one" else NUM_RANKS, partial(run_rank, name, folder, only)) for name in launches]
    return int(not all(ended))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
