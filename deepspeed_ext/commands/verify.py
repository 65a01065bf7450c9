"""``deepspeed-ext verify``: trains a small model with a user's config on real ranks, compares it
with plain training, resumes it, and kills an optimizer process.

The command's process makes the config of the check from the user's, starts the ranks, limits their
time and reports. Each rank (`Rank`) writes its verdicts to a file. The kernel ends a rank with the
command, and an optimizer process with its rank.
"""

import faulthandler
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor, nn

import deepspeed_ext
from deepspeed_ext.adapter import upstream
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.config.file import count_in, read_json, section_of
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.runtime.backend import dist, get_accelerator
from deepspeed_ext.runtime.log import counted, one_line
from deepspeed_ext.runtime.process import end_with_parent, python_command

CHECKS, REFUSED = ("training", "resume", "worker's death"), "config"
"""Names of verdicts; the last one is there only if DeepSpeed or this package refuses the config."""
PLAN = "plan.json"  # in the folder of the check: its config, number of steps, and the next constant
GRACE_SECONDS = 60.0
"""Time for all ranks to end after one has failed or an optimizer process was killed."""
STEPS, WARM_UP, MOST_BATCH = 8, 2, 8
LEFT_OUT = (
    "tensorboard wandb csv_monitor comet flops_profiler comms_logger autotuning elasticity nebula "
    "curriculum_learning data_efficiency compression_training eigenvalue progressive_layer_drop "
    "tensor_parallel sequence_parallel_size pipeline load_universal train_batch_size"
)
"""Fields that write outside the check's folder, or are about the user's data, model and cluster."""
ADAMW = {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
SCHEDULE = {"warmup_min_lr": 0.0, "warmup_max_lr": 5e-5, "warmup_num_steps": 0}
AUTO: dict[str, Any] = {**ADAMW, **SCHEDULE, "total_num_steps": 1000, "bf16.enabled": True}
"""What the Hugging Face Trainer fills in for "auto"; other fields get DeepSpeed's default."""
Verdict = tuple[str, str]  # PASS, FAIL or SKIPPED, and why


class Report(NamedTuple):
    """The result: a verdict by the name of each check."""

    ranks: int
    steps: int
    changes: list[str]
    checks: dict[str, Verdict]
    warnings: list[str]
    output: str

    @property
    def passed(self) -> bool:
        return all(status != "FAIL" for status, _ in self.checks.values())

    def as_text(self) -> str:
        """Differences from the config, a line per check, warnings, and a failed rank's output."""
        failed = sum(status == "FAIL" for status, _ in self.checks.values())
        end = f"{failed} of {len(self.checks)} checks failed" if failed else "nothing failed"
        lines = [
            f"{counted(self.ranks, 'rank')}, {counted(self.steps, 'step')}",
            *(f"  changed for the check: {change}" for change in self.changes),
            *(f"{status:<7}  {name:<14}  {how}" for name, (status, how) in self.checks.items()),
            *(f"warning: {warning}" for warning in self.warnings),
            *(f"  | {line}" for line in self.output.splitlines() if failed),
            f"{end}, {counted(len(self.warnings), 'warning')}" if self.warnings else end,
        ]
        return "\n".join(lines)


def run_from_cli(arguments: Namespace) -> tuple[str, bool]:
    """The report for the parsed arguments, and whether nothing failed.

    Raises:
        ConfigError: the config cannot be read, or DeepSpeed refuses it.
    """
    config, accelerator = read_json(arguments.config), get_accelerator()
    count = 0 if accelerator.device_name() == "cpu" else accelerator.device_count()
    if 0 < count < (arguments.ranks or 0):
        raise ConfigError(f"--ranks {arguments.ranks}: only {counted(count, 'accelerator')} here")
    report = verify(config, arguments.ranks or count or 2, arguments.steps, arguments.timeout)
    if arguments.json:
        about = {"config": arguments.config, "passed": report.passed}
        return json.dumps({**about, **report._asdict()}, indent=2), report.passed
    return f"{arguments.config}: {report.as_text()}", report.passed


def checked_config(
    user: Mapping[str, Any], steps: int | None
) -> tuple[dict[str, Any], int, list[str]]:
    """The config of a check, its number of steps (None: enough), and what differs from `user`."""
    changes: list[str] = []
    config, needed = _filled(user, "", changes) | {"steps_per_print": 10**9}, STEPS
    sizes = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & set(user):
        raise ConfigError(f"set train_batch_size or {next(iter(sizes))}: DeepSpeed needs one")
    for name, default in sizes.items():
        config[name] = min(count_in(user, name) or default, MOST_BATCH)
        if config[name] != user.get(name):
            changes.append(f"{name}: {config[name]}")
    zero = section_of(config, "zero_optimization")
    if not section_of(config, "optimizer"):
        # torch's, as the Trainer passes it; under offload Accelerate makes it DeepSpeed's CPU Adam
        is_offloaded = section_of(zero, "offload_optimizer").get("device", "none") != "none"
        params = {**ADAMW, "torch_adam": not is_offloaded}
        config["optimizer"] = {"type": "AdamW", "params": params}
        changes.append(f"the config has no optimizer: AdamW with lr {ADAMW['lr']}")
    elif not isinstance(config["optimizer"].get("type"), str):
        raise ConfigError("optimizer.type: expected a name, such as AdamW, got none")
    if (zenflow := section_of(zero, "zenflow")) or zero.get("zenflow") == {}:
        warm_up = zenflow.get("full_warm_up_rounds", WARM_UP + 1)
        if isinstance(warm_up, int) and warm_up > WARM_UP:
            zenflow["full_warm_up_rounds"] = WARM_UP
            changes.append(f"zenflow.full_warm_up_rounds: {WARM_UP}")
        if isinstance(interval := zenflow.get("update_interval"), int):
            needed += 4 * (interval - 1)
    return config, steps or needed, changes


def _filled(section: Mapping[str, Any], where: str, changes: list[str]) -> dict[str, Any]:
    """A copy of a section without fields that are left out, and with a value for each "auto"."""
    filled: dict[str, Any] = {}
    for name, value in section.items():
        if name in LEFT_OUT.split():
            changes.append(f"{where}{name} is left out")
        elif isinstance(value, Mapping):
            filled[name] = _filled(value, f"{where}{name}.", changes)
        elif value != "auto":
            filled[name] = value
        elif (key := name if name in AUTO else f"{where}{name}") in AUTO:
            filled[name] = AUTO[key]
            changes.append(f"{where}{name}: {AUTO[key]} in place of auto")
        else:
            changes.append(f"{where}{name}: DeepSpeed's default in place of auto")
    return filled


def start_rank(folder: Path, environment: dict[str, str], log: BinaryIO) -> Any:
    command = python_command("deepspeed_ext.commands.verify", str(folder), str(os.getpid()))
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
    return subprocess.Popen(command, env=environment, start_new_session=True, **streams)


def verify(
    user: Mapping[str, Any],
    ranks: int,
    steps: int | None = None,
    limit_seconds: float = 600.0,
    start: Callable[[Path, dict[str, str], BinaryIO], Any] = start_rank,
) -> Report:
    """Check a config in so many steps (None: enough for it), in ranks that `start` starts.

    Raises:
        ConfigError: DeepSpeed or this package refuses the config.
    """
    with tempfile.TemporaryDirectory("", "dsext-verify-", ignore_cleanup_errors=True) as name:
        folder, processes = Path(name), list[Any]()
        config, steps, changes = checked_config(user, steps)
        (folder / PLAN).write_text(json.dumps([config, steps, GRACE_SECONDS]))
        try:
            for rank in range(ranks):
                with (folder / f"{rank}.log").open("wb") as log:
                    processes.append(start(folder, _environment(rank, ranks), log))
            deadline = time.monotonic() + limit_seconds
            while None in (statuses := [process.poll() for process in processes]):
                if any(statuses):
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait(GRACE_SECONDS)
        results = [folder / f"{rank}.json" for rank in range(ranks)]
        written = [json.loads(path.read_text()) if path.exists() else {} for path in results]
        checks = _merged(written, statuses)
        logs = [(folder / f"{rank}.log").read_text(errors="replace") for rank in range(ranks)]
    warnings = re.findall(r"\[WARNING\] \[deepspeed_ext\] (.*)", "\n".join(logs))
    rank = next((rank for rank, status in enumerate(statuses) if status != 0), 0)
    output = f"output of rank {rank}:\n{logs[rank][-2000:].strip()}"
    return Report(ranks, steps, changes, checks, list(dict.fromkeys(warnings)), output)


def _environment(rank: int, ranks: int) -> dict[str, str]:
    given = {k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "MASTER_PORT")}
    given |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    given |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(ranks))
    given.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    return given | {"DSEXT_LOG_LEVEL": "INFO"}


def _merged(results: list[dict[str, Verdict]], statuses: list[int | None]) -> dict[str, Verdict]:
    """Merge the ranks' verdicts: a check has passed if it has on every rank. A rank without a
    status had to be killed.

    Raises:
        ConfigError: a rank refused the config.
    """
    if refused := [result[REFUSED][1] for result in results if REFUSED in result]:
        raise ConfigError(f"this config cannot train: {refused[0]}")
    how = ", ".join("killed: too late" if each is None else str(each) for each in statuses)
    ended, checks = ("FAIL", f"the ranks ended with the statuses {how}"), dict[str, Verdict]()
    for name in CHECKS:
        verdicts = [result.get(name, ended) for result in results]
        if ended in verdicts and any(status == "FAIL" for status, _ in checks.values()):
            break  # the one before has ended the run
        checks[name] = next((each for each in verdicts if each[0] == "FAIL"), verdicts[0])
    # after an optimizer process's death, any status may occur
    if checks.get(CHECKS[-1], ended)[0] == "SKIPPED" and any(each != 0 for each in statuses):
        checks["end"] = ended
    return checks


# -- a rank ----------------------------------------------------------------------------------------

TOLERANCE, OF_WEIGHTS = 0.1, 4
"""Largest deviation from plain training, of a parameter's movement and of a gradient's norm: more
than rounding and prediction, less than a gradient dropped once in eight steps. Weights, whose
prediction may be a step off, may deviate by `OF_WEIGHTS` times as much, beside their rounding."""
VOCABULARY, COMMON, WIDTH, HIDDEN, LENGTH = 2053, 89, 64, 131, 24
"""Sizes of the model and its sequences. Tokens below COMMON follow one another by a rule."""

REFUSALS = (ValueError, TypeError, KeyError, AssertionError, NotImplementedError)
"""Exceptions with which this package refuses a config, and DeepSpeed beside its own."""
Weights = dict[str, Tensor]  # fp32, on the host, by the parameter's name


class SmallModel(nn.Module):
    """Predicts the next token; has odd sizes, a tied head, and parameters of 1 and 3 dimensions."""

    def __init__(self, seed: int = 20) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.mix = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, bias=False)
            self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)
            gain = torch.full((1,), 1.5, dtype=torch.float32, device="cpu")
            self.norm, self.gain = nn.LayerNorm(WIDTH), nn.Parameter(gain)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
            self.head.weight = self.embedding.weight
            nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [batch, LENGTH], int64. Returns the mean cross-entropy."""
        x = self.embedding(tokens)
        x = x + self.mix(nn.functional.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
        x = x + self.down(nn.functional.gelu(self.up(x)))
        logits = self.head(self.norm(x) * self.gain)[:, :-1].float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def data_of(step: int, config: Mapping[str, Any], device: Any) -> Iterator[Tensor]:
    """Tokens of each micro-step of a step on this rank: [batch, LENGTH]."""
    draw = torch.Generator().manual_seed(1 + step * 4096 + dist.get_rank())
    count = config["train_micro_batch_size_per_gpu"]
    for _ in range(config["gradient_accumulation_steps"]):
        first = torch.randint(COMMON, (count, 1), generator=draw)
        rare = torch.randint(COMMON, VOCABULARY, (count, LENGTH), generator=draw)
        tokens = (first + 7 * torch.arange(LENGTH, dtype=torch.int64, device="cpu")) % COMMON
        is_rare = torch.rand(count, LENGTH, dtype=torch.float32, device="cpu", generator=draw) < 0.1
        yield torch.where(is_rare, rare, tokens).to(device)


class Trained(NamedTuple):
    """Steps of an engine: the mean loss of all ranks and the norm of the gradient in each, infinite
    where it was skipped, NaN where it is not known; and what they end with, as of `Rank.state`."""

    losses: list[float]
    norms: list[float]
    weights: Weights
    masters: Weights


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of plain training: torch's Adam or AdamW on the accelerator at stage 1, gradients
    summed in fp32, none of our fields."""
    params = section_of(config["optimizer"], "params")
    # without a value in the config, DeepSpeed's own Adams decay by 0, torch's AdamW by 0.01
    given: dict[str, Any] = {} if params.get("torch_adam") else {"weight_decay": 0.0}
    names = ("lr", "betas", "eps", "weight_decay", "amsgrad", "adam_w_mode")
    given |= {name: params[name] for name in names if name in params} | {"torch_adam": True}
    plain = {
        "optimizer": {"type": config["optimizer"]["type"], "params": given},
        "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    for name in {"bf16", "bfloat16"} & set(config):  # without what is about the optimizer's state
        plain[name] = {"enabled": section_of(config, name).get("enabled", False)}
    return {**config, **plain}


class Rank:
    """A rank of the check. The methods named like checks run in their order and judge."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, int(os.environ["RANK"])
        self.config, self.steps, self.grace = json.loads((folder / PLAN).read_text())
        self.save_after = self.steps // 2 | 1
        section = section_of(self.config, "zero_optimization").get("zenflow")
        self.zenflow = None if section is None else ZenFlowConfig(**section)
        self.engine: Any = None

    def run(self) -> None:
        """Make every check; the first that raises ends the rank."""
        checks: dict[str, Verdict] = {}
        for name, part in zip(CHECKS, (self.training, self.resume, self.death), strict=True):
            try:
                checks[name] = part()
            except BaseException as error:
                of_config = (*REFUSALS, upstream.deepspeed.DeepSpeedConfigError)
                is_refused = self.engine is None and isinstance(error, of_config)
                checks[REFUSED if is_refused else name] = "FAIL", one_line(error)[:600]
                raise
            finally:
                (self.folder / f"{self.number}.json").write_text(json.dumps(checks))
        if self.zenflow is None:
            self.end()

    def initialize(self) -> None:
        """Join the other ranks."""
        accelerator, backend = upstream.get_accelerator(), "gloo"
        if accelerator.device_name() == "cpu":
            upstream.fp16_on_any_cpu()
        else:
            accelerator.set_device(int(os.environ["LOCAL_RANK"]))
            backend = accelerator.communication_backend_name()
        ranks = int(os.environ["WORLD_SIZE"])  # a URL would end at a # in the path
        store = torch.distributed.FileStore(str(self.folder / "rendezvous"), ranks)
        torch.distributed.init_process_group(backend, None, None, ranks, self.number, store)
        with upstream.swapped(upstream.no_shared_buffers()):
            upstream.deepspeed.init_distributed(dist_backend=backend)

    def make_engine(self, config: Mapping[str, Any], model: nn.Module) -> None:
        given = {"model_parameters": list(model.parameters()), "config": dict(config)}
        self.engine = deepspeed_ext.initialize(model=model, **given)[0]

    def state(self) -> tuple[Weights, Weights]:
        """The parameters in full, and their fp32 masters, which may be the same. A collective."""
        weights, masters = {}, {}
        for name, param in self.engine.module.named_parameters():
            with upstream.deepspeed.zero.GatheredParameters([param]):
                weights[name] = param.detach().float().cpu().clone()
            master = upstream.master_of(param)
            masters[name] = weights[name] if master is None else master.cpu().view_as(weights[name])
        return weights, masters

    def step(self, number: int) -> float:
        """Take an optimizer step; return the mean loss of all ranks."""
        losses = []
        for tokens in data_of(number, self.config, self.engine.device):
            loss = self.engine(tokens)
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach().float())
        dist.all_reduce(total := torch.stack(losses).mean())
        return float(total) / dist.get_world_size()

    def train(self, first: int = 0, *, saves: bool = False) -> Trained:
        """Take the steps from `first`; save in the middle, if asked to."""
        losses, norms = list[float](), list[float]()
        for number in range(first, self.steps):
            if saves and number == self.save_after:
                self.engine.save_checkpoint(str(self.folder / "saved"), tag="saved")
            losses.append(self.step(number))
            norm = self.engine.get_global_grad_norm()
            is_skipped = bool(getattr(self.engine.optimizer, "overflow", False))
            norms.append(math.inf if is_skipped else math.nan if norm is None else float(norm))
        return Trained(losses, norms, *self.state())

    def training(self) -> Verdict:
        """Norms of gradients, and movements of weights and masters, are those of plain training."""
        self.initialize()
        self.make_engine(self.config, SmallModel())
        dtype = next(self.engine.module.parameters()).dtype
        named = SmallModel().named_parameters()
        self.first = {name: param.detach().to(dtype).float() for name, param in named}
        self.own = own = self.train(saves=True)
        self.engine.destroy()
        moved = {name: float((w - self.first[name]).norm()) for name, w in own.masters.items()}
        what = f"{own.losses[0]:.4f} -> {own.losses[-1]:.4f}"
        if still := [name for name, length in moved.items() if not 0 < length < math.inf]:
            return "FAIL", f"{what}; parameters that do not move: {', '.join(still)}"
        if why := self._why_not_comparable():
            return "PASS", f"{what}; {why}"
        self.make_engine(plain_config(self.config), SmallModel())
        plain = self.train()
        self.engine.destroy()
        apart = {
            f"the gradient's norm in step {number}": abs(norm / due - 1.0)
            for number, (norm, due) in enumerate(zip(own.norms, plain.norms, strict=True), start=1)
            if not math.isnan(norm) and norm != due
        }
        quantizes = section_of(self.config, "zero_optimization").get("zero_quantized_weights")
        for name, master in plain.masters.items():
            length = float((master - self.first[name]).norm())
            rounding = 2 * float((master - master.to(dtype)).norm())
            beyond = float((own.weights[name] - master).norm()) - rounding
            apart[f"the movement of {name}"] = float((own.masters[name] - master).norm()) / length
            apart[f"the weights of {name}"] = 0.0 if quantizes else beyond / length / OF_WEIGHTS
        if wrong := [f"{name} ({d:.0%})" for name, d in apart.items() if not d <= TOLERANCE]:
            return "FAIL", f"{what}; {len(wrong)} deviations, such as {', '.join(wrong[:3])}"
        worst = max(apart, key=lambda name: apart[name])
        return "PASS", f"{what}; deviations: at most {apart[worst]:.1%}, of {worst}"

    def _why_not_comparable(self) -> str:
        """Why there is no plain training; empty: there is."""
        name, params = self.config["optimizer"]["type"], self.config["optimizer"].get("params", {})
        low = any("master_weights_and_grads" in str(self.config.get(k)) for k in ("bf16", "fp16"))
        if self.zenflow is not None and self.zenflow.rule == "selective":
            return "not compared: the selective rule defers most updates by design"
        if low or name.lower() not in ("adam", "adamw") or not params.get("bias_correction", True):
            return f"not compared: torch has no such {name}"
        return ""

    def resume(self) -> Verdict:
        """A new engine that loads the checkpoint takes bitwise the same steps."""
        self.make_engine(self.config, SmallModel(seed=21))
        self.load()
        again, own = self.train(self.save_after), self.own
        losses = own.losses[self.save_after :]
        what = f"{len(losses)} steps from step {self.save_after} in a new engine"
        pairs = (again.weights, own.weights), (again.masters, own.masters)
        is_same = all(torch.equal(new[name], old[name]) for new, old in pairs for name in old)
        if again.losses == losses and is_same:
            return "PASS", f"{what}: losses, weights and masters equal to the bit"
        apart = [
            float((again.masters[name] - master).norm() / (master - self.first[name]).norm())
            for name, master in own.masters.items()
        ]
        if self.zenflow is None and all(each <= TOLERANCE for each in apart):
            return "PASS", f"{what}: DeepSpeed's own steps need not repeat to the bit"
        what += f": losses {again.losses} and not {losses}; "
        return "FAIL", f"{what}masters differ by up to {max(apart):.2%} of their movement"

    def load(self) -> None:
        self.engine.load_checkpoint(str(self.folder / "saved"), tag="saved")

    def death(self) -> Verdict:
        """The death of rank 0's optimizer process is an error on every rank."""
        if self.zenflow is None:
            return "SKIPPED", "this config has no optimizer process"
        dist.barrier()
        if self.number == 0:
            os.kill(self.engine.optimizer.host_optimizer.link.process.pid, signal.SIGKILL)
        faulthandler.dump_traceback_later(self.grace, exit=True)  # says where it waits
        most = 4 * (self.zenflow.update_interval or 4) + 4
        try:
            for step in range(most):
                self.step(self.steps + step)
        except Exception as error:
            return "PASS", f"an error on every rank: {one_line(error)[:160]}"
        return "FAIL", f"{most} more steps without an error: they trained without it"

    def end(self) -> None:
        self.engine.destroy()
        dist.destroy_process_group()


def main(kind: type[Rank] = Rank) -> None:
    """Run a rank. Arguments of the process: the folder of the check, and its parent's id."""
    end_with_parent()
    if not os.path.exists(f"/proc/{sys.argv[2]}"):  # it ended before the line above ran
        raise SystemExit("the check has ended before this rank began")
    kind(Path(sys.argv[1])).run()
