"""Calibration against scipy and by hand."""

from __future__ import annotations

import random

import pytest
from scipy.stats import mannwhitneyu, spearmanr

from spo.tasks.verifier import calibration_of


def test_order_is_told_as_scipy_tells_it_ties_included() -> None:
    rng = random.Random(5)
    labels = [rng.choice((0.0, 0.25, 1.0)) for _ in range(200)]
    scores = [round(min(1.0, max(0.0, label * 0.6 + rng.uniform(0, 0.5))), 1) for label in labels]

    found = calibration_of(scores, labels, 0.5)

    right = [score for score, label in zip(scores, labels, strict=True) if label >= 0.5]
    wrong = [score for score, label in zip(scores, labels, strict=True) if label < 0.5]
    assert found.spearman == pytest.approx(spearmanr(scores, labels).statistic)
    assert found.auc == pytest.approx(mannwhitneyu(right, wrong).statistic / (len(right) * len(wrong)))
    assert sum(each.examples for each in found.bins) == found.examples == 200


def test_agreement_confusion_and_bins_by_hand() -> None:
    found = calibration_of([0.9, 0.2, 0.7, 0.3, 1.0], [1, 0, 0, 1, 1], 0.7)

    confusion = found.right_and_passed, found.right_and_failed, found.wrong_and_passed, found.wrong_and_failed
    assert (confusion, found.agreement) == ((2, 1, 1, 1), 0.6)
    assert [(each.low, each.examples, each.mean_label) for each in found.bins] == [
        (0.2, 1, 0.0),
        (0.3, 1, 1.0),
        (0.7, 1, 0.0),
        (0.9, 2, 1.0),
    ]
    assert found.mean_error == pytest.approx((0.1 + 0.2 + 0.7 + 0.7 + 0) / 5)


def test_labels_that_are_all_alike_have_no_order() -> None:
    found = calibration_of([0.1, 0.9], [1, 1], 0.5)
    assert (found.spearman, found.auc, found.agreement) == (None, None, 0.5)
