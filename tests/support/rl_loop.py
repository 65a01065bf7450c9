"""A loop of reinforcement learning as trainers with colocated generation run it, with a small stub
of the engine."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import deepspeed
import torch
from torch import nn

import deepspeed_ext
from deepspeed_ext.integrations import shared_memory
from tests.support.models import on_device
from tests.support.same import assert_same
from tests.support.zenflow import make_engine

GROUP, PROMPTS, LENGTH = 4, 2, 12
"""Samples of a prompt, prompts of a rank, tokens of a sample."""
VOCABULARY = 64


class Policy(nn.Module):
    """Next-token logits from the token before; a tied head, a frozen scale, odd sizes."""

    def __init__(self, width: int = 37) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)
        self.scale = nn.Parameter(torch.ones(width), requires_grad=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.2)  # so that it samples more than the same token

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = (hidden + self.down(torch.relu(self.up(hidden)))) * self.scale
        return self.head(hidden)

    def forward(self, tokens: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """The policy gradient's loss: of each sample's tokens, times its advantage."""
        chosen = (
            self.logits(tokens[:, :-1])
            .float()
            .log_softmax(-1)
            .gather(2, tokens[:, 1:, None])[..., 0]
        )
        return -(chosen.mean(1) * advantages).mean()


def generate(policy: Policy, number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample from the policy; tokens [GROUP * PROMPTS, LENGTH] and advantages within each group.

    In fp64: two processes may round 16-bit products differently, and sample another token.
    """
    policy = copy.deepcopy(policy).double()
    generator = torch.Generator().manual_seed(100 * number + rank)
    first = torch.randint(0, VOCABULARY, (PROMPTS,), generator=generator)
    tokens = first.repeat_interleave(GROUP)[:, None]
    with torch.no_grad():
        for _ in range(LENGTH - 1):
            chances = policy.logits(tokens[:, -1:])[:, 0].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], 1)
    rewards = (tokens < VOCABULARY // 2).double().mean(1).view(PROMPTS, GROUP)
    scaled = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return tokens, scaled.flatten().float()


class Generator:
    """The stub of an inference engine: has weights of its own, which arrive by name."""

    def __init__(self) -> None:
        self.policy = Policy().bfloat16()

    def load_weights(self, weights: Any) -> set[str]:
        """As vLLM's models do: takes an iterator of name and tensor."""
        own = dict(self.policy.named_parameters(remove_duplicate=False))
        loaded = set()
        for name, tensor in weights:
            own[name].data.copy_(tensor)
            loaded.add(name)
        assert loaded == set(own)
        return loaded


def serve(connection: Connection, rank: int) -> None:
    """The stub in a process of its own: receives weights and returns samples, until told to end."""
    torch.set_num_threads(1)
    stub = Generator()
    while (number := connection.recv()) is not None:
        stub.load_weights(shared_memory.receive(connection))
        connection.send((generate(stub.policy, number, rank), stub.policy.state_dict()))


class Remote:
    """The stub in another process of this host."""

    def __init__(self, rank: int) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=serve, args=(theirs, rank), daemon=True)
        self._process.start()
        theirs.close()

    def __call__(self, number: int, weights: Any) -> Any:
        self._connection.send(number)
        shared_memory.hand_over(weights, self._connection, 4000)
        return self._connection.recv()

    def close(self) -> None:
        self._connection.send(None)
        self._process.join()


def loop(
    config: dict[str, Any],
    iterations: int,
    take: Callable[[Any, int], tuple[Any, dict[str, torch.Tensor]]],
) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Train; returns the loss of each iteration, and the weights with which it generated.

    Args:
        take: generates with the engine's weights: samples, and the weights that it got.
    """
    engine = make_engine(config, model=Policy)
    losses, received = [], []
    for number in range(iterations):
        (tokens, advantages), weights = take(engine, number)
        received.append({name: each.clone() for name, each in weights.items()})
        for micro in zip(tokens.chunk(2), advantages.chunk(2), strict=True):
            loss = engine(*map(on_device, micro))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    engine.destroy()
    return losses, received


def awake(engine: Any, number: int) -> Any:
    """Generate with p, rounded, as the model shows it, while the engine stays as it is."""
    stub, partitioned = Generator(), engine.zero_optimization_stage() == 3
    params = list(engine.module.parameters())
    with engine.exporting(), deepspeed.zero.GatheredParameters(params, enabled=partitioned):
        shown = engine.module.state_dict()
        stub.load_weights({name: each.cpu() for name, each in shown.items()}.items())
    return generate(stub.policy, number, deepspeed.comm.get_rank()), stub.policy.state_dict()


def asleep(engine: Any, number: int) -> Any:
    """Generate while the engine sleeps, in this process."""
    stub = Generator()
    engine.offload_states()
    stub.load_weights(deepspeed_ext.weights(engine, 4000))
    made = generate(stub.policy, number, deepspeed.comm.get_rank()), stub.policy.state_dict()
    engine.reload_states()
    return made


def both_loops(config: dict[str, Any], iterations: int, remote: bool) -> tuple[int, list[float]]:
    """Compare the loop that sleeps with the one that does not; how many weights differ from the
    first iteration's at the end, and the losses."""
    expected, shown = loop(copy.deepcopy(config), iterations, awake)
    if remote:
        other = Remote(deepspeed.comm.get_rank())

        def take(engine: Any, number: int) -> Any:
            engine.offload_states()
            made = other(number, deepspeed_ext.weights(engine, 4000))
            engine.reload_states()
            return made

        losses, received = loop(config, iterations, take)
        other.close()
    else:
        losses, received = loop(config, iterations, asleep)
    assert_same(expected, losses, "losses")
    assert_same(shown, received, "the generator's weights")
    changed = [not torch.equal(each, received[0][name]) for name, each in received[-1].items()]
    return sum(changed), losses
