"""How long ranks wait for each other: modelled for 8, 64 and 512 ranks, measured on two.

    python benchmarks/balance.py --data DIR --csv balance.csv   # about 3 minutes
    python benchmarks/balance.py --measured                     # two real ranks on this CPU, about 2 minutes

Modelled: imbalance is the sum over micro-steps of the largest rank cost over the sum of the mean cost, with the cost
model of Llama 2 7B, 4 micro-batches per step (`--accumulation`), one plan (`stream`, packs as they are closed, whole
steps only, so that all packs are full) for all methods of a row:
  random            packs in the order of the plan, as in TRL; `balance="none"`
  micro             `balance="step"`, ranks wait after every micro-batch (ZeRO-2, ZeRO-3, FSDP)
  step              `balance="step"`, ranks wait once per step (DDP, ZeRO-1)
  bound             lower bound of all schedules with the same documents per step and the same capacity, for both
  trl               TRL's method: its `bfd` in blocks of 1000 documents, packs in random order, ranks in turn. Its steps
                    have other documents from the same draw, and not all of its packs are full (`trl_full`)
  batch_rebalance   transformers' `BatchRebalanceSampler` on the documents of the first step. Its padding counts in its
                    time and in its mean (`padded`: its tokens over the real ones). Its batches have no capacity:
                    `tokens` is the largest batch over the capacity. Only for steps with few documents, because its
                    search is quadratic in them
Lengths: `flan` and `chat` are drawn from t0_p3_sample and oasst1_en_val_threads of --data, else lognormal with the same
mean and spread; `long` is chat-like (lognormal, median 600, sigma 1) with 1 % of the documents at 8k to 64k tokens and
0.1 % at 64k to 128k, uniform in the logarithm; `flan_long` has the same tail on lengths like FLAN's. All are cut at the
capacity, batch size 1.

Measured: one optimizer step after another on 2 gloo ranks under DDP, one thread each; the same documents per step,
balanced and in the plan's order, in turns in one pair of processes. Ranks synchronise after every micro-batch, as with
TRL's gathering of metrics. The model is a Llama of hidden size 256, in which attention has the same share of the cost
at 4,096 tokens as in Llama 2 7B at 65,536. The documents are `long`, with lengths and capacity divided by 16.
`imbalance` is computed from modelled FLOPs, and again from each rank's CPU seconds of forward and backward. Waiting
uses no CPU seconds; the share spent outside of forward and backward is shown. Wall time shows the same only on an idle
machine.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from common import REAL_DATA, Row, cpu_seconds, describe, file_lengths, make_console, make_parser, write_csv
from planning import one_byte_tokens
from rich.console import Console
from rich.table import Table
from support.bounds import imbalance_bound

from trl_packfix.data.model_costs import make_cost_model
from trl_packfix.planning.costs import LLAMA_7B
from trl_packfix.planning.packs import PackPlan, plan_stream
from trl_packfix.planning.schedule import Schedule, imbalance, schedule_packs
from trl_packfix.planning.units import Bins, Units

ACCUMULATION = 4
CAPACITIES = (8192, 32768, 65536)
TARGETS = {8192: 1.03, 32768: 1.05, 65536: 1.13}
STEP_TARGET = 1.005
STEPS = {8: 4, 64: 1, 512: 1}
FILES = {"flan": "t0_p3_sample", "chat": "oasst1_en_val_threads"}
LOGNORMAL = {"flan": (114, 1.06), "chat": (325, 0.72), "long": (600, 1.0), "flan_long": (114, 1.06)}  # median, sigma
# documents of a step: its search is quadratic
MOST_FOR_REBALANCE = {"flan": 3_000, "chat": 3_000, "long": 13_000, "flan_long": 4_000}
SCALE = 16  # of the lengths of --measured


def draw(name: str, num: int, real: dict[str, np.ndarray], seed: int = 0) -> np.ndarray:
    """`num` lengths in tokens, before truncation."""
    rng = np.random.default_rng(seed)
    if name in real:
        return rng.choice(real[name], num)
    median, sigma = LOGNORMAL[name]
    lengths = np.maximum(rng.lognormal(np.log(median), sigma, num), 10)
    if name.endswith("long"):
        place = rng.random(num)
        lengths = np.where(place < 0.011, 2 ** rng.uniform(13, 16, num), lengths)
        lengths = np.where(place < 0.001, 2 ** rng.uniform(16, 17, num), lengths)
    return lengths.astype(np.int64)


def as_closed(lengths: np.ndarray, capacity: int) -> PackPlan:
    """Packs of `stream` in the order in which they are closed. One that is not full is the last, in no whole step."""
    return plan_stream(lengths, capacity, order=np.random.default_rng([0, 0]).permutation(len(lengths)))


def modelled(name: str, capacity: int, world_size: int, accumulation: int, real: dict[str, np.ndarray]) -> Row:
    slots = accumulation * world_size
    mean = np.minimum(draw(name, 20_000, real, seed=1), capacity).mean()
    lengths = np.minimum(draw(name, int((STEPS[world_size] + 0.3) * slots * capacity / mean), real), capacity)
    plan = as_closed(lengths, capacity)
    num_steps = plan.num_packs // slots

    def made(balance: str, synchronisation: str) -> Schedule:
        bins = Bins(
            capacity=capacity,
            accumulation=accumulation,
            world_size=world_size,
            balance=balance,
            synchronisation=synchronisation,
            drop_last=True,
        )
        return schedule_packs(plan, Units(lengths, LLAMA_7B), num_steps, bins=bins)

    as_they_come = made("none", "micro")
    row: Row = {
        "lengths": name,
        "capacity": capacity,
        "ranks": world_size,
        "accumulation": accumulation,
        "steps": num_steps,
    }
    row |= {"documents": len(as_they_come.order), "efficiency": efficiency(plan, lengths, num_steps * slots)}
    for kind in ("micro", "step"):
        seconds, schedule = cpu_seconds(lambda kind=kind: made("step", kind))
        row[f"{kind}_us_per_document"] = seconds / len(schedule.order) * 1e6
        row[f"{kind}_random"] = imbalance(as_they_come, LLAMA_7B(lengths), kind)
        row[kind] = imbalance(schedule, LLAMA_7B(lengths), kind)
        row[f"{kind}_bound"] = imbalance_bound(schedule, Units(lengths, LLAMA_7B), capacity, synchronisation=kind)
    row |= trl_random(lengths, capacity, accumulation, world_size)
    if len(as_they_come.step_documents(0)) <= MOST_FOR_REBALANCE[name]:
        row |= rebalanced(as_they_come, lengths, capacity)
    return row


def efficiency(plan: PackPlan, lengths: np.ndarray, num_packs: int) -> float:
    return float(lengths[plan.order[: plan.offsets[num_packs]]].sum() / (num_packs * plan.capacity))


def targets(capacity: int) -> dict[str, float]:
    return {"micro": TARGETS[capacity], "step": STEP_TARGET}


def verdict(row: Row, kind: str, target: float) -> str:
    if row[kind] <= target:
        return "met"
    return f"{target} impossible" if row[f"{kind}_bound"] > target else f"{target} missed"


def trl_random(lengths: np.ndarray, capacity: int, accumulation: int, world_size: int) -> Row:
    """Whole steps of TRL's packs in the order of one epoch, assigned to ranks in turn as by accelerate."""
    import trl.data_utils

    costs: list[float] = []
    full: list[float] = []
    for start in range(0, len(lengths), 1000):
        packed = trl.data_utils._pack_bfd(one_byte_tokens(lengths[start : start + 1000]), capacity)
        sizes = packed["seq_lengths"].combine_chunks()
        starts = sizes.offsets.to_numpy()[:-1]
        documents = sizes.values.to_numpy().astype(np.int64)  # FLOPs exceed TRL's int32
        costs += np.add.reduceat(LLAMA_7B(documents), starts).tolist()
        full += (np.add.reduceat(documents, starts) / capacity).tolist()
    order = np.random.default_rng(0).permutation(len(costs))
    slots = accumulation * world_size
    steps = np.array(costs)[order][: len(order) // slots * slots].reshape(-1, accumulation, world_size)
    if not len(steps):
        return {}
    by_rank = steps.sum(axis=1)
    return {
        "micro_trl": float(steps.max(axis=2).sum() / steps.mean(axis=2).sum()),
        "step_trl": float(by_rank.max(axis=1).sum() / by_rank.mean(axis=1).sum()),
        "trl_full": float(np.mean(full)),
    }


def rebalanced(schedule: Schedule, lengths: np.ndarray, capacity: int) -> Row:
    """transformers' sampler on the first of our steps. Its search takes minutes on a large step."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    documents = schedule.step_documents(0)
    some = lengths[documents]
    sampler = BatchRebalanceSampler(
        some.tolist(), len(some), schedule.world_size, schedule.accumulation, shuffle=False, drop_last=False
    )
    ranks = sampler._assign(list(range(len(some))), some.tolist())
    longest = np.array([[some[batch].max() for batch in rank] for rank in ranks])
    size = np.array([[len(batch) for batch in rank] for rank in ranks])
    costs = size * LLAMA_7B(longest)  # (W, G): every document of a batch is as long as its longest
    return {
        "batch_rebalance": float(costs.max(axis=0).sum() / costs.mean(axis=0).sum()),
        "padded": float((size * longest).sum() / some.sum()),
        "tokens": float((size * longest).max() / capacity),
    }


def two_ranks(rank: int, rounds: int, csv: Path | None) -> None:
    """One of the two processes of --measured."""
    import torch
    import torch.distributed as dist
    from support.models import select_attention
    from transformers import LlamaConfig, LlamaForCausalLM

    from trl_packfix.attention.forwards import mark_packed_forwards
    from trl_packfix.data.collator import PackedDataCollator

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=128, max_position_embeddings=8192)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    select_attention(model)
    mark_packed_forwards(model)
    trained = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(trained.parameters(), 1e-3)
    collate = PackedDataCollator()

    capacity = 65_536 // SCALE
    num_steps = 4
    lengths = np.clip(draw("long", 2_400, {}) // SCALE, 2, capacity)
    plan = as_closed(lengths, capacity)
    costs = make_cost_model(config)
    schedules = {
        balance: schedule_packs(
            plan,
            Units(lengths, costs),
            num_steps,
            bins=Bins(
                capacity=capacity,
                accumulation=ACCUMULATION,
                world_size=2,
                balance=balance,
                drop_last=True,
            ),
        )
        for balance in ("none", "step")
    }

    def run(schedule: Schedule, num: int) -> Row:
        """CPU seconds of each micro-batch on both ranks, and of waiting; wall time from the first to the last."""
        busy: list[float] = []
        rng = np.random.default_rng(0)
        batches = []
        for documents in list(schedule.micro_batches(rank))[:num]:
            tokens = [rng.integers(3, 128, lengths[i]) for i in documents]
            batches.append(collate([{"input_ids": ids, "labels": ids} for ids in tokens]))
        dist.barrier()
        start = time.perf_counter()
        cpu = time.process_time()
        for turn, batch in enumerate(batches):
            last = (turn + 1) % ACCUMULATION == 0
            trained.require_backward_grad_sync = last
            started = time.process_time()
            loss = trained(**batch).loss
            loss.backward()
            busy.append(time.process_time() - started)
            dist.all_reduce(loss.detach())  # where the faster rank waits
            if last:
                optimizer.step()
                optimizer.zero_grad()
        cpu = time.process_time() - cpu
        dist.barrier()
        row: Row = {"wall_s": time.perf_counter() - start}
        ranks = torch.zeros(2, len(busy) + 1)
        ranks[rank] = torch.tensor([*busy, cpu])
        dist.all_reduce(ranks)
        each = ranks[:, :-1]
        row["cpu_slower_s"] = float(each.max(0).values.sum())
        row["imbalance"] = float(each.max(0).values.sum() / each.mean(0).sum())
        row["cpu_outside_share"] = 1 - float(each.sum() / ranks[:, -1].sum())  # waiting, optimizer, loop
        return row

    rows: list[Row] = []
    for turn in range(rounds + 1):
        for balance, schedule in schedules.items():
            row = run(schedule, ACCUMULATION if turn == 0 else num_steps * ACCUMULATION)
            if turn:  # the first turn is a warm-up
                rows.append({"balance": balance, "round": turn, "steps": num_steps, "capacity": capacity} | row)
    if rank == 0:
        modelled = {name: imbalance(schedule, costs(lengths), "micro") for name, schedule in schedules.items()}
        bound = imbalance_bound(schedules["none"], Units(lengths, costs), capacity, synchronisation="micro")
        for row in rows:
            row |= {"modelled_imbalance": modelled[row["balance"]], "modelled_bound": bound}
            row["documents"] = len(schedules[row["balance"]].order)
        print_measured(rows)
        write_csv(csv, rows)
    trained = trained.module  # DDP as the group's last owner would free it under the lock for which gloo's threads wait
    dist.destroy_process_group()


def print_measured(rows: list[Row]) -> None:
    def spread(values: list[float]) -> str:
        return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"

    first = rows[0]
    by_name = {name: [row for row in rows if row["balance"] == name] for name in ("none", "step")}
    table = Table("balance", "imbalance, modelled", "measured", "CPU s, slower rank", "wall s", "CPU outside")
    for name, some in by_name.items():
        columns = [spread([row[key] for row in some]) for key in ("imbalance", "cpu_slower_s", "wall_s")]
        outside = f"{max(row['cpu_outside_share'] for row in some):.3f}"
        table.add_row(name, f"{some[0]['modelled_imbalance']:.3f}", *columns, outside)
    columns = [f"{by_name['none'][0]['modelled_imbalance'] / by_name['step'][0]['modelled_imbalance']:.3f}"]
    for key in ("imbalance", "cpu_slower_s", "wall_s"):
        ratios = [old[key] / new[key] for old, new in zip(by_name["none"], by_name["step"], strict=True)]
        columns.append(spread(ratios))
    table.add_row("none / step", *columns, "")
    Console(width=150).print(
        f"[bold]Two ranks[/], {first['steps']} steps of {ACCUMULATION} micro-batches of {first['capacity']} tokens, "
        f"{first['documents']} documents, {len(by_name['none'])} rounds: median (smallest to largest); modelled bound "
        f"{first['modelled_bound']:.3f}",
        table,
    )


def measured() -> None:
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20_000 + os.getpid() % 20_000)}
    environment = os.environ | port | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *sys.argv, "--rank"]
    processes = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(2)]
    codes = [process.wait(timeout=1800) for process in processes]
    if any(codes):
        sys.exit("a rank failed")


def main() -> None:
    parser = make_parser(__doc__, REAL_DATA)
    parser.add_argument("--lengths", nargs="+", choices=LOGNORMAL, default=list(LOGNORMAL))
    parser.add_argument("--accumulation", type=int, default=ACCUMULATION, help="micro-batches per step")
    parser.add_argument("--measured", action="store_true", help="two real ranks instead of the model")
    parser.add_argument("--rounds", type=int, default=3, help="of --measured")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        sys.argv = sys.argv[: sys.argv.index("--rank")]  # the command that the CSV names
        two_ranks(args.rank, args.rounds, args.csv)
        return
    console = make_console(150)
    console.print(describe())
    if args.measured:
        measured()
        return

    real = {}
    if args.data:
        files = dict(file_lengths(args.data))
        real = {name: files[file] for name, file in FILES.items()}
    columns = ["lengths", "capacity", "ranks", "micro_trl", "micro_random", "micro", "micro_bound"]
    columns += ["step_trl", "step_random", "step", "step_bound", "batch_rebalance", "padded", "tokens"]
    table = Table(*columns, "micro target", "step target")
    rows = []
    for name in args.lengths:
        for capacity in CAPACITIES:
            for world_size in STEPS:
                row = modelled(name, capacity, world_size, args.accumulation, real)
                rows.append(row | {"real": name in real, "target": TARGETS[capacity], "step_target": STEP_TARGET})
                cells = [
                    format(row[c], ".3f") if isinstance(row.get(c), float) else str(row.get(c, "")) for c in columns
                ]
                table.add_row(*cells, *(verdict(row, kind, most) for kind, most in targets(capacity).items()))
                console.print(name, capacity, world_size, f"{row['micro']:.3f}", style="dim")
        table.add_section()
    console.print(table)
    write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
