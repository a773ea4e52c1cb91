"""Numbers and tables in texts: what a claim or a kept table says is written, and what is stale is named."""

import pytest

from analysis import documents
from analysis.driver import convergence_study

KEPT = """\
method,lag_updates,updates,settings,seeds,broken,final_loss,final_loss_low,final_loss_high,goal_loss,seeds_at_goal,\
tokens_to_goal,tokens_to_goal_low,tokens_to_goal_high,command
late,3,600,optimizer.learning_rate=0.01 optimizer.num_warmup_steps=7,5,1,2.5,2.25,2.75,2.2,2,,,,make
in_time,0,600,optimizer.learning_rate=0.02 optimizer.num_warmup_steps=9,5,0,2.1,2.05,2.15,2.2,5,12345,12000,12690,make
broken,1,,optimizer.learning_rate=0.02 optimizer.num_warmup_steps=9,5,5,,,,2.2,0,,,,make
"""


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A text with one mark of each kind; the claim `pace` says 1.24, the kept table is `KEPT`."""
    kept = tmp_path / "kept.csv"
    kept.write_text(KEPT, encoding="utf-8")
    monkeypatch.setattr(documents, "TABLES", {"study": lambda: convergence_study.markdown(kept)})
    monkeypatch.setattr(documents, "number_of", {"pace": "1.24"}.__getitem__)
    monkeypatch.setattr(documents, "ROOT", tmp_path)
    path = tmp_path / "page.md"
    path.write_text("A\n1.24<!--=pace--> B\n<!--table=study-->\nold\n<!--/table-->\n", encoding="utf-8")
    return path


def test_what_is_stale_is_named_with_its_line_until_it_is_written(text):
    assert list(documents.stale([text])) == ["page.md:3: the table study is not the one that is kept"]
    text.write_text(text.read_text().replace("1.24", "1.3"), encoding="utf-8")
    assert len(list(documents.stale([text]))) == 2
    text.write_text(documents.written(text.read_text(), documents.number_of), encoding="utf-8")
    assert list(documents.stale([text])) == []
    assert "1.24<!--=pace-->" in text.read_text()


def test_a_table_shows_the_best_first_with_what_did_not_arrive(text):
    lines = documents.written(text.read_text(), documents.number_of).splitlines()[2:-1]
    assert [line.split("|")[1].strip() for line in lines[3:]] == ["`in_time`", "`late`", "`broken`"]
    assert "| 2.100 (2.050 to 2.150) | 12,345 (12,000 to 12,690) | learning_rate=0.02 num_warmup_steps=9 |" in lines[3]
    assert "| 2.500 (2.250 to 2.750); 1 of 5 seeds broke | 2 of 5 seeds reach it |" in lines[4]
    assert "| none; 5 of 5 seeds broke | 0 of 5 seeds reach it |" in lines[5]


def test_an_unknown_table_is_refused():
    with pytest.raises(LookupError, match="convergence_study"):
        documents.table_of("unknown")
