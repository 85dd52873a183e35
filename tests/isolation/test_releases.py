"""docs/leaks_by_release: the page is that of the table, and the table that of the judge."""

import pytest
import transformers
from support.paths import DOCS
from sweep import page as compatibility
from sweep import releases

from trl_packfix.version import TESTED_VERSIONS

TESTED = TESTED_VERSIONS["transformers"]
TABLE = releases.read(DOCS / releases.TABLE)


def test_the_page_is_made_of_the_table():
    assert (DOCS / releases.PAGE).read_text() == releases.page(TABLE)
    assert {"5.16.0", "5.20.0", "5.23.0", TESTED} <= set(releases.releases_of(TABLE))


def test_both_surveys_agree_on_the_release_that_they_share():
    """Compare with the survey in docs/compatibility.csv, which is made with the probe and the repair."""
    stock = {(row.model_type, row.kind): row.stock_trl or "not judged" for row in compatibility.read(DOCS)}
    column = {key: row[TESTED] for key, row in TABLE.items() if row[TESTED]}
    assert len(column) > 250
    assert column == stock


@pytest.mark.skipif(transformers.__version__ != TESTED, reason=f"the column is that of transformers {TESTED}")
@pytest.mark.parametrize("model_type", ["llama", "opt", "bamba"])
def test_the_verdict_of_a_type_is_that_of_the_table(model_type, tmp_path):
    file = tmp_path / releases.TABLE
    releases.judge_types([(model_type, "causal")], file, time_limit=60)
    wanted = TABLE[model_type, "causal"][TESTED]
    assert releases.read(file) == {(model_type, "causal"): {TESTED: wanted}}
