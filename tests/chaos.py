"""Kill a run at random points, resume it, and compare every batch and the weights with a run that was left alone.

    python tests/chaos.py                        20 rounds on one process and 20 on two ranks
    python tests/chaos.py --rounds 3 --ranks 2 --workers 2 --seed 7

A round waits for a random optimizer step, or for the checkpoint after it to be begun, and for some milliseconds; then
one rank, drawn at random, gets SIGKILL. The next round resumes from the newest whole checkpoint. A run that comes to
its end is compared and begun anew. Processes are forked from one that has imported everything.
"""

import argparse
import faulthandler
import json
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from ranks.restarts import THREE_EPOCHS
from ranks.scenarios import Numbered, document_ids, make
from ranks.training import save_model
from safetensors.torch import load_file
from support.launch import free_port

from trl_packfix.training.checkpoints import newest_whole

TESTS = Path(__file__).parent
SETTINGS = THREE_EPOCHS | {
    "num": 60,
    "save_strategy": "steps",
    "save_steps": 2,
    "save_total_limit": 2,
    "packing_report": True,  # as users have it: one more file that is written again after a resume
}
SECONDS = 60  # in which the other ranks must have ended, too


class Noting(Numbered):
    """Writes the optimizer step and the documents of every micro-batch before it is trained."""

    notes = None

    def get_batch_samples(self, *args):
        batches, num_items = super().get_batch_samples(*args)
        for batch in batches:
            print(json.dumps([self.state.global_step, document_ids(batch)]), file=self.notes, flush=True)
        return batches, num_items


def rank_main(folder: Path, name: str, attempt: int, *, rank: int, ranks: int, port: str, **settings: int) -> None:
    """Run one rank of one attempt, from the newest whole checkpoint of `folder / name` if there is one."""
    log = (folder / f"{name}-{attempt}-{rank}.log").open("w")
    faulthandler.enable(log)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    if ranks > 1:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({key: str(value) for key, value in (where | {"RANK": rank, "LOCAL_RANK": rank}).items()})
    multiprocessing.set_start_method("fork", force=True)  # as under a launcher; else workers inherit "forkserver"
    resume = newest_whole(folder / name)[0] is not None
    trainer = make(folder, "ddp" if ranks > 1 else None, Noting, output_dir=name, **SETTINGS | settings)
    trainer.notes = notes_of(folder, name, attempt, rank).open("w")
    trainer.train(resume_from_checkpoint=resume or None)
    trainer.save_model(str(folder / name / "final"))
    if ranks > 1:
        torch.distributed.barrier()  # the process ends at once, so nothing destroys the group (`fork_ranks`)


def notes_of(folder: Path, name: str, attempt: int, rank: int) -> Path:
    return folder / name / f"notes-{attempt}-{rank}.jsonl"


def read_notes(file: Path) -> list[tuple[int, list[int]]]:
    """Return (step, documents) of each micro-batch; the last line may be half."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [tuple(json.loads(line)) for line in lines]


class Chaos:
    """The runs of one number of ranks, in `folder`."""

    def __init__(self, folder: Path, ranks: int, workers: int, seed: int):
        self.folder = folder
        self.ranks = ranks
        self.workers = workers
        self.random = random.Random(seed)
        self.attempt = self.kills = self.unfinished = self.finished_runs = 0
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["chaos"])
        save_model(folder, "llama")
        self.start_ranks("alone")
        self.join(must_succeed=True)
        self.expected = [read_notes(notes_of(folder, "alone", 0, rank)) for rank in range(ranks)]
        self.num_steps = self.expected[0][-1][0] + 1

    def start_ranks(self, name: str) -> None:
        self.name = name
        (self.folder / name).mkdir(exist_ok=True)
        settings = {"dataloader_num_workers": self.workers, "ranks": self.ranks, "port": free_port()}
        rank_arguments = (self.folder, name, self.attempt)
        self.processes = [
            self.context.Process(target=rank_main, args=rank_arguments, kwargs=settings | {"rank": rank})
            for rank in range(self.ranks)
        ]
        for process in self.processes:
            process.start()

    def join(self, must_succeed: bool = False) -> bool:
        """Wait for all ranks; return whether they came to the end. None may outlive another by more than a minute."""
        while all(process.is_alive() for process in self.processes):
            time.sleep(0.02)
        deadline = time.monotonic() + SECONDS
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                raise SystemExit(f"A rank was still alive {SECONDS} seconds after another had ended.")
        succeeded = all(process.exitcode == 0 for process in self.processes)
        if must_succeed and not succeeded:
            logs = [log.read_text() for log in sorted(self.folder.glob(f"{self.name}-{self.attempt}-*.log"))]
            codes = [process.exitcode for process in self.processes]
            raise SystemExit(f"Attempt {self.attempt}, which nobody killed, ended with {codes}:\n{logs}")
        return succeeded

    def round(self, kill: bool = True) -> None:
        """Make one attempt; it is killed at a random point unless `kill` is False or it comes to the end before."""
        checkpoint, passed_over = newest_whole(self.folder / "run")
        self.unfinished += len(passed_over)
        done = int(checkpoint.name.split("-")[1]) if checkpoint else 0
        self.start_ranks("run")
        if kill:
            # Within the length of an epoch from here, so that some runs come to their end and some die in each epoch.
            self.kill_at(done + self.random.randrange(self.num_steps // 3), in_saving=self.random.random() < 0.5)
        finished = self.join(must_succeed=not kill)
        self.compare(finished)
        self.attempt += 1

    def kill_at(self, step: int, in_saving: bool) -> None:
        """Send SIGKILL to a random rank, a moment after `step` or the next checkpoint begins, if they ever do."""
        victim = self.random.choice(self.processes)
        notes = notes_of(self.folder, "run", self.attempt, 0)
        every = SETTINGS["save_steps"]
        next_checkpoint = self.folder / "run" / f"checkpoint-{(step // every + 1) * every}"
        while all(process.is_alive() for process in self.processes):
            steps = read_notes(notes)
            if steps and steps[-1][0] >= step and (not in_saving or next_checkpoint.exists()):
                time.sleep(self.random.uniform(0, 0.03 if in_saving else 0.1))
                if victim.is_alive():
                    os.kill(victim.pid, signal.SIGKILL)
                    self.kills += 1
                return
            time.sleep(0.002)

    def compare(self, finished: bool) -> None:
        for rank, expected in enumerate(self.expected):
            steps = read_notes(notes_of(self.folder, "run", self.attempt, rank))
            if not steps:
                continue  # killed before its first batch
            first = [step for step, _ in expected].index(steps[0][0])
            if steps != expected[first : first + len(steps)]:
                raise SystemExit(f"Attempt {self.attempt}, rank {rank} trained other batches than the run left alone.")
        if finished:
            weights, expected = (self.weights(name) for name in ("run/final", "alone/final"))
            if not torch.equal(weights, expected):
                difference = (weights - expected).abs().max()
                raise SystemExit(f"Attempt {self.attempt} ended with other weights, by up to {difference:.1e}.")
            shutil.rmtree(self.folder / "run")
            self.finished_runs += 1

    def weights(self, name: str) -> torch.Tensor:
        return torch.cat([value.flatten() for value in load_file(self.folder / name / "model.safetensors").values()])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--workers", type=int, default=0, help="that read for each rank")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    # The process that all others are forked from finds this module, and this package, there.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory() as scratch:
            started = time.monotonic()
            rounds = Chaos(Path(scratch), ranks, arguments.workers, arguments.seed)
            while rounds.kills < arguments.rounds:
                rounds.round()
            rounds.round(kill=False)
        seconds = time.monotonic() - started
        result = f"{rounds.finished_runs} runs to the end: batches and weights as uninterrupted ({seconds:.0f} s)"
        passed_over = f"{rounds.unfinished} unfinished checkpoints passed over"
        print(f"{ranks} rank(s): {rounds.kills} kills, {passed_over}, {result}", flush=True)
