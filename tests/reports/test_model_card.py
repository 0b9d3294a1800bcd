from __future__ import annotations

import pytest
import yaml
from commands import compose_train
from omegaconf import OmegaConf

from proxy_anchor.reports.model_card import model_card

ROW = {"epoch": 3, "recall": {"1": 0.617, "2": 0.73}, "validation": None}
RESULT = dict.fromkeys(("untrained", "selected", "best", "last"), ROW) | {
    "selected_by": "Recall@1 on the test classes, as in the paper",
    "searched": "test",
    "device": "cpu (1 threads)",
    "versions": {"torch": "2.14"},
    "history": [{**ROW, "train_seconds": 1.0, "eval_seconds": 1.0}],
    "seconds_per_epoch": 1.0,
    "train_images_per_second": 1.0,
    "eval_images_per_second": 1.0,
    "startup_seconds": {"total": 1.0, "images": 0.0, "first_evaluation": 0.0, "compilation": 0.0},
}


@pytest.mark.parametrize("dataset", ["glyphs", "cub", "cars", "sop", "inshop", "folder"])
def test_card_says_data_recipe_results_and_licence(dataset: str) -> None:
    config = OmegaConf.to_container(compose_train(f"dataset={dataset}"), resolve=True)
    _, front, body = model_card(config, RESULT, "data: made up, 3 train images").split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "proxy_anchor"
    for heading in ("## Data", "## Recipe", "## Results", "## Licence notes"):
        assert heading in body
    assert "| best | 3 | 61.7 | 73.0 |" in body
    assert "alpha 32.0, delta 0.1" in body
    assert "selected by Recall@1 on the test classes" in body
    assert "see the data set" not in body  # every data set has terms of its own


def test_weights_terms_follow_the_weights() -> None:
    texts = {
        "none, trained from scratch": ["dataset=glyphs"],
        "file mine.pth, under its own terms": ["dataset=cars", "backbone=resnet50", "backbone.weights=/a/mine.pth"],
        "licence bsd-3-clause": ["dataset=cars", "backbone=bninception"],
    }
    for text, overrides in texts.items():
        config = OmegaConf.to_container(compose_train(*overrides), resolve=True)
        assert text in model_card(config, RESULT, "data")
