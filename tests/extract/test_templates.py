"""Which prompt template a text result is of: the one extracted last, said and stored with the result."""

import pytest
from command import data_of, ok
from made_path import place_of
from pictures import folder

from fedcache import Store

pytestmark = pytest.mark.slow

SMALL = "--batch 4 --chunk-rows 8 --workers 0"
OTHER = "the character {} here"
ZERO = "train --method clip-zs --scheme iid --clients 2 --backbones glyph-clip"


@pytest.fixture
def words(tmp_path):
    """The extract command of three classes with text features."""
    images = folder(tmp_path / "shapes", train=8)
    return f"extract --dataset folder:{images} --backbones glyph-clip {SMALL}"


def test_extracting_a_template_again_makes_it_current_and_computes_nothing(words):
    path = place_of(words)
    template = Store.open(path).templates("glyph-clip")
    before = data_of(ZERO)
    assert before["text_templates"] == template

    other = data_of(f"{words} --text", OTHER)
    assert other["decoded"] == 0
    assert other["text"] == [{"backbone": "glyph-clip", "templates": [OTHER], "state": "computed"}]
    changed = ok(ZERO)
    assert changed.data["text_templates"] == [OTHER]
    assert f'Text template: "{OTHER}"' in changed.err
    assert changed.data["digest"] != before["digest"]
    assert data_of("inspect")["text_templates"] == {"glyph-clip": [OTHER]}

    ok(f"{words} --dry-run")
    assert Store.open(path).templates("glyph-clip") == [OTHER]
    again = data_of(words)["text"]
    assert again == [{"backbone": "glyph-clip", "templates": template, "state": "made current"}]
    back = data_of(ZERO)
    assert back["reused"]
    assert back["digest"] == before["digest"]
    assert back["text_templates"] == template
    assert data_of(words)["text"][0]["state"] == "current"


def test_what_train_extracts_on_its_own_leaves_the_chosen_template(words, tmp_path):
    ok(words)
    path = place_of(f"{words} --text", OTHER)
    done = ok(
        f"train --method tpfl --dataset folder:{tmp_path / 'shapes'} --scheme iid --clients 2 "
        "--rounds 1 --set epochs=1 --backbones glyph-clip,pixels"
    )
    assert "Nothing extracted yet" in done.err, "the images were not there"
    assert done.data["text_templates"] == [OTHER]
    assert Store.open(path).templates("glyph-clip") == [OTHER]
