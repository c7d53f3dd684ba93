"""Shares of the mix that are drawn and that no loss term learns from."""

from __future__ import annotations

from collections.abc import Iterator

from spo.errors import FieldViolation
from spo.spec.job_spec import JobSpec


def unlearned_shares(spec: JobSpec) -> Iterator[FieldViolation]:
    """Each part of `replay.mix` that every term leaves out; where all of them are, the spec itself is refused."""
    if not spec.trainer.steps:
        return
    drawn = {part.source for part in spec.replay.mix if part.share > 0}
    learned = set[str]()
    for term in spec.algorithm.losses:
        # Without annotations such a term is 0.
        able = {"annotated"} if term.needs("annotations") else drawn
        learned |= able if term.sources is None else able & set(term.sources)
    for index, part in enumerate(spec.replay.mix):
        if part.share > 0 and part.source not in learned:
            yield FieldViolation(
                f"/replay/mix/{index}/source",
                f"no term of algorithm.losses learns from {part.source}: {part.share:.0%} of each batch changes no "
                "weight. Name it in a term's `sources`, or drop the share",
            )
