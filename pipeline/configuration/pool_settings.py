"""Settings of the drafter pool, and what tables of settings have in common."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from schemas import checks


def _identifier(value: str) -> str:
    if not checks.IDENTIFIER.fullmatch(value):
        raise ValueError(f"expected /{checks.IDENTIFIER.pattern}/")
    return value


Identifier = Annotated[str, AfterValidator(_identifier)]


class Section(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


class DrafterSettings(Section):
    """One drafter of the pool: a `[[drafters]]` table; keys of other kinds are not read."""

    drafter_id: Identifier
    """Names the drafter in events, policies and artifacts."""
    kind: Literal[
        "none", "prompt_lookup", "suffix", "causal_lm", "hydra", "convex", "eagle", "token_lm"
    ]
    """`none` never drafts; `hydra`, `convex`, `eagle` and `token_lm` are heads, which learn."""
    path: str = ""
    """Model folder (`causal_lm`)."""
    longest: int = Field(default=4, ge=1, le=64)
    """Longest n-gram looked up first (`prompt_lookup`, `suffix`)."""
    shortest: int = Field(default=2, ge=1, le=64)
    """Shortest n-gram that may match (`prompt_lookup`, `suffix`)."""
    inner_size: int = Field(default=1152, ge=1, le=1_000_000)
    """Width of the inner layer (`hydra`, `eagle`, `token_lm`)."""
    memory_positions: int = Field(default=1_000_000, ge=1)
    """Positions of past traffic that training draws from: few follow, many remember (heads)."""
    replay_bytes: int = Field(default=0, ge=0)
    """Bytes of a fair sample of every stream's past, half of each batch; 0 = no sample (heads)."""
    rank: int = Field(default=256, ge=1, le=1_000_000)
    """Features that it is linear in (`convex`), or width of its token vectors (`token_lm`)."""
    num_heads: int | None = Field(default=None, ge=1, le=1024)
    """Heads of attention, which divide the target's hidden size; none: of width 64 (`eagle`)."""
    num_context: int = Field(default=16, ge=1, le=10_000)
    """Tokens before the newest that it reads (`eagle`, `token_lm`)."""
    counts_tail: bool = False
    """Train on the probability outside the recorded tokens too (heads)."""
    acceptance_weight: float = Field(default=0.0, ge=0, le=100)
    """Weight of the total variation to the target beside the cross-entropy (heads)."""
    negative_weight: float = Field(default=0.0, ge=0, le=100)
    """Weight of the penalty on proposals that would be rejected (heads)."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the untrained weights (heads)."""

    @property
    def is_trained(self) -> bool:
        """Whether it is a head, which learns and is released."""
        return self.kind in ("hydra", "convex", "eagle", "token_lm")

    @model_validator(mode="after")
    def _has_a_path(self) -> Self:
        if self.kind == "causal_lm" and not self.path:
            raise ValueError(f"drafter {self.drafter_id!r}: expected path, the folder of its model")
        return self


DEFAULT_POOL = (
    DrafterSettings(drafter_id="none", kind="none"),
    DrafterSettings(drafter_id="prompt-lookup", kind="prompt_lookup", longest=3),
    DrafterSettings(drafter_id="suffix", kind="suffix", longest=6),
    DrafterSettings(drafter_id="head-recent", kind="hydra", memory_positions=1500, seed=1),
    DrafterSettings(drafter_id="head-replay", kind="hydra", seed=2),
)


def _pool(drafters: tuple[DrafterSettings, ...]) -> tuple[DrafterSettings, ...]:
    ids = [one.drafter_id for one in drafters]
    repeated = sorted({one for one in ids if ids.count(one) > 1})
    if repeated:
        raise ValueError(f"drafter_id {repeated[0]!r} stands twice, expected distinct ones")
    if not ids:
        raise ValueError("expected at least one drafter")
    return drafters


Pool = Annotated[tuple[DrafterSettings, ...], AfterValidator(_pool)]
