"""A vision transformer on scikit-learn's digits, and a fine-tune of rxnmapper's ALBERT.

Neither package is imported, and neither has to be complete:
``pip install --no-deps scikit-learn rxnmapper`` is enough. Only a data file of scikit-learn and the
weights and vocabulary of rxnmapper (MIT licence) are read.
"""

from __future__ import annotations

import gzip
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from studies.numerics.task import Batch, Task

HELD_OUT_EVERY = 5
NOT_A_TARGET = -100


class MissingPackageError(ImportError):
    """A package whose files a task reads is not installed."""


def _file_of(package: str, name: str, distribution: str) -> Path:
    found = importlib.util.find_spec(package)
    for folder in found.submodule_search_locations or () if found else ():
        if (Path(folder) / name).exists():
            return Path(folder) / name
    raise MissingPackageError(
        f"this task reads {package}/{name}: run `pip install --no-deps {distribution}`"
    )


# -- digits ----------------------------------------------------------------------------------------


@cache
def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    """1797 images of 8 x 8, from 0 to 1, and their labels."""
    path = _file_of("sklearn", "datasets/data/digits.csv.gz", "scikit-learn")
    with gzip.open(path, "rt") as lines:
        values = torch.tensor([[float(x) for x in line.split(",")] for line in lines])
    return values[:, :64].view(-1, 8, 8) / 16.0, values[:, 64].long()


class VisionTransformer(nn.Module):
    """Sixteen patches of 2 x 2, four blocks, and the mean of their outputs."""

    hidden, heads, layers = 64, 4, 4

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(4, self.hidden)
        self.position = nn.Parameter(
            torch.empty(16, self.hidden, dtype=torch.float32).normal_(std=0.02)
        )
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                self.hidden,
                self.heads,
                4 * self.hidden,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(self.layers)
        )
        self.norm = nn.LayerNorm(self.hidden)
        self.head = nn.Linear(self.hidden, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        patches = images.unfold(1, 2, 2).unfold(2, 2, 2).flatten(1, 2).flatten(2)
        x = self.patch(patches.to(self.position.dtype)) + self.position
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x.mean(1))).float(), labels)


@dataclass(frozen=True)
class Digits(Task):
    """Classify digits."""

    def model(self) -> nn.Module:
        return VisionTransformer()

    def draw(self, generator: torch.Generator, examples: int) -> Batch:
        images, labels = _digits()
        known = torch.arange(len(labels))
        known = known[known % HELD_OUT_EVERY != 0]
        chosen = known[torch.randint(len(known), (examples,), generator=generator)]
        shift = torch.randint(-1, 2, (2,), generator=generator).tolist()
        return images[chosen].roll(shift, (1, 2)), labels[chosen]

    def held_out(self) -> list[Batch]:
        images, labels = _digits()
        return [(images[::HELD_OUT_EVERY], labels[::HELD_OUT_EVERY])]


# -- fine-tuning -----------------------------------------------------------------------------------

_FOLDER = "models/transformers/albert_heads_8_uspto_all_1310k"
_GROUPS = (
    "C CC CCC CCCC C(C)C CC(C)C C1CCCC1 C1CCCCC1 c1ccccc1 "
    "c1ccc(F)cc1 c1ccc(Cl)cc1 c1ccncc1 c1ccsc1 Cc1ccccc1"
)
_REACTIONS = (
    ("O C ( = O )", "N", ">>", "N C ( = O )"),
    ("O C ( = O )", "O", ">>", "O C ( = O )"),
    ("Cl S ( = O ) ( = O )", "N", ">>", "N S ( = O ) ( = O )"),
    ("Br C", "S", ">>", "S C"),
)
_LENGTH = 48
_MASKED = 0.15


@cache
def _vocabulary() -> dict[str, int]:
    lines = _file_of("rxnmapper", f"{_FOLDER}/vocab.txt", "rxnmapper").read_text().splitlines()
    return {token: number for number, token in enumerate(lines)}


def _tokens(group: str) -> list[str]:
    """Tokens of one of `_GROUPS`: one character each, but Cl is one token."""
    return ["Cl" if letter == "X" else letter for letter in group.replace("Cl", "X")]


def _reaction(generator: torch.Generator) -> list[str]:
    """An acid derivative and a nucleophile with random groups, and what they form, as tokens of
    SMILES."""
    groups = _GROUPS.split()

    def drawn(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=generator))

    first, second = (_tokens(groups[drawn(len(groups))]) for _ in range(2))
    left, middle, arrow, right = _REACTIONS[drawn(len(_REACTIONS))]
    return [*left.split(), *first, ".", middle, *second, arrow, *second, *right.split(), *first]


@dataclass(frozen=True)
class Reactions(Task):
    """Fine-tune rxnmapper's ALBERT, a masked language model of reactions, on four kinds of
    generated reactions."""

    def model(self) -> nn.Module:
        return MaskedReactions()

    def draw(self, generator: torch.Generator, examples: int) -> Batch:
        known = _vocabulary()
        tokens = torch.zeros(examples, _LENGTH, dtype=torch.long)
        for row in tokens:
            found = ["[CLS]", *_reaction(generator)[: _LENGTH - 2], "[SEP]"]
            row[: len(found)] = torch.tensor([known.get(token, known["[UNK]"]) for token in found])
        is_text = tokens > known["[SEP]"]
        masked = is_text & (torch.rand(tokens.shape, generator=generator) < _MASKED)
        masked[:, 1] = True  # no batch without a target
        return tokens.masked_fill(masked, known["[MASK]"]), tokens.masked_fill(
            ~masked, NOT_A_TARGET
        )

    def held_out(self) -> list[Batch]:
        generator = torch.Generator().manual_seed(2**40)
        return [self.draw(generator, 32) for _ in range(4)]


class MaskedReactions(nn.Module):
    """The pretrained network with its loss; without dropout, so that rules see the same forward
    pass."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import AlbertConfig, AlbertForMaskedLM

        config = AlbertConfig.from_json_file(
            _file_of("rxnmapper", f"{_FOLDER}/config.json", "rxnmapper")
        )
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = (
            config.classifier_dropout_prob
        ) = 0.0
        self.albert = AlbertForMaskedLM(config)
        weights = torch.load(
            _file_of("rxnmapper", f"{_FOLDER}/pytorch_model.bin", "rxnmapper"),
            map_location="cpu",
            weights_only=True,
        )
        missing, _ = self.albert.load_state_dict(weights, strict=False)
        lost = [
            name for name in missing if not name.endswith("position_ids") and "decoder" not in name
        ]
        if lost:
            raise ValueError(f"rxnmapper's file lacks weights of the network: {lost}")

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.albert(input_ids=tokens, attention_mask=(tokens != 0).long()).logits
        return functional.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), ignore_index=NOT_A_TARGET
        )
