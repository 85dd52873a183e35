"""Scenarios of sequence parallelism on four real ranks (gloo, CPU); `test_shared_packs.py` launches them.

    python tests/shared_packs.py FOLDER [LAUNCH ...]

The libraries are imported once, and the ranks of each launch are forks of that process: importing them costs more than
the scenarios. Each scenario returns a dictionary that rank 0 saves as FOLDER/LAUNCH/NAME.pt; the first that raises ends
its launch.
"""

import faulthandler
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from trl_packfix.attention import exchange, varlen
from trl_packfix.attention.exchange import HeadExchange
from trl_packfix.attention.forwards import PackedForward, entered
from trl_packfix.attention.varlen import varlen_attention

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


FAULTS = {"leak": leaking, "chunks": wrong_chunks, "heads": wrong_heads}

# Attention alone

LENGTHS = [5, 1, 30, 2, 9, 1]  # 48 tokens: parts of 24 and of 12, and the third document lies in several
HEADS = [(8, 8), (8, 4), (8, 2), (8, 1), (6, 3), (6, 2), (5, 1), (28, 4), (9, 3), (10, 5)]
FEATURES = {
    "full": {},
    "window": {"sliding_window": 4},
    "sinks": {"sinks": True},
    "window and sinks": {"sliding_window": 4, "sinks": True},
    "value dim": {"value_dim": 6},
    "softcap": {"softcap": 2.0},
}


def attention(folder: Path) -> dict:
    """Largest difference of outputs and gradients from the whole pack, by case and by fault; in fp64."""
    exchange.make_groups((2, 4))
    cases = {
        f"{heads}/{kv_heads} {name} on {degree}": difference(heads, kv_heads, degree, **features)
        for heads, kv_heads in HEADS
        for name, features in FEATURES.items()
        for degree in (2, 4)
    }
    faults = {}
    for name, fault in FAULTS.items():
        with fault():
            faults[name] = [difference(8, 2, degree) for degree in (2, 4)]
    return {"cases": cases, "faults": faults, "groups": {degree: group_ranks(degree) for degree in (2, 4)}}


def group_ranks(degree: int) -> list[int]:
    return dist.get_process_group_ranks(exchange.group_of(degree))


def difference(heads, kv_heads, degree, value_dim=4, sinks=False, **features) -> float:
    """Of the outputs and of the gradients of queries, keys, values and sinks, on any rank."""
    generator = torch.Generator().manual_seed(heads)
    num_tokens = sum(LENGTHS)
    shapes = [(heads, num_tokens, 4), (kv_heads, num_tokens, 4), (kv_heads, num_tokens, value_dim)]
    states = [torch.randn(1, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    logits = torch.randn(heads, generator=generator, dtype=torch.float64)
    weights = torch.randn(1, num_tokens, heads, value_dim, generator=generator, dtype=torch.float64)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32)
    whole = PackedForward(bounds, bounds, max(LENGTHS), max(LENGTHS))
    tokens = num_tokens // degree
    first = dist.get_rank() % degree * tokens
    part = slice(first, first + tokens)

    def run(forward, own):
        given = [x[:, :, own].clone().requires_grad_() for x in states] + [logits.clone().requires_grad_()]
        with entered(forward):
            out, _ = varlen_attention(nn.Module(), *given[:3], None, s_aux=given[3] if sinks else None, **features)
        grads = torch.autograd.grad(out, given, weights[:, own], allow_unused=True)
        return out.detach(), grads

    expected, expected_grads = run(whole, slice(None))
    out, grads = run(replace(whole, degree=degree, part_tokens=tokens), part)
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


# Launches


def scenarios(launch: str) -> dict[str, Callable[[Path], dict]]:
    """By name, in the order in which they run."""
    return {"attention": attention}


LAUNCHES = ("ddp",)


def run_rank(launch: str, rank: int, port: int, folder: Path) -> None:
    ids = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_RANKS, "LOCAL_WORLD_SIZE": NUM_RANKS}
    os.environ |= {name: str(value) for name, value in ids.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo")
    for name, scenario in scenarios(launch).items():
        result = scenario(folder)
        if rank == 0:
            torch.save(result, folder / launch / f"{name}.pt")
    dist.destroy_process_group()


def fork_ranks(launch: str, port: int, folder: Path) -> bool:
    """Run all scenarios of a launch; whether all ranks ended well."""
    (folder / launch).mkdir(exist_ok=True)
    children = {}
    for rank in range(NUM_RANKS):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run_rank(launch, rank, port, folder)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children[child] = rank
    codes = {}
    while children:
        child, status = os.wait()
        codes[children.pop(child)] = status
        if status:  # the others wait for this rank
            for other in children:
                os.kill(other, 15)
    return not any(codes.values())


if __name__ == "__main__":
    faulthandler.enable()
    folder, *names = sys.argv[1:]
    from support.launch import free_port

    ended = [fork_ranks(name, int(free_port()), Path(folder)) for name in names or LAUNCHES]
    sys.exit(not all(ended))
